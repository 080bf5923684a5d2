// skim report: draws the files of --metrics.
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <string>
#include <vector>

#include "skim/error.hpp"
#include "tools/command_line.hpp"
#include "tools/commands.hpp"
#include "tools/keep_beside.hpp"
#include "tools/report_page.hpp"

namespace fs = std::filesystem;

namespace skim::tool {
namespace {

int write_report(const std::vector<fs::path>& files, const fs::path& out) {
  ReportPage page;
  for (std::size_t i = 0; i < files.size(); ++i) {
    std::error_code ignored;
    const auto is_same = [&](const fs::path& other) {
      return fs::equivalent(other, files[i], ignored);
    };
    if (std::any_of(files.begin(), files.begin() + static_cast<std::ptrdiff_t>(i), is_same)) {
      throw InvalidArgument("'" + files[i].string() + "' is given twice");
    }
    if (is_same(out)) {
      throw InvalidArgument("--out is a file to read: '" + out.string() +
                            "'; give the page another name");
    }
    if (!page.add_file(files[i])) {
      throw InvalidArgument("'" + files[i].string() +
                            "' has no steps; expected a file that skim train --metrics wrote");
    }
  }
  const std::string html = page.html(false);
  if (out == "-") {
    std::fwrite(html.data(), 1, html.size(), stdout);
    return 0;
  }
  keep_beside("--out", out);
  replace_file("--out", out, html);
  return 0;
}

}  // namespace

int report_command(int argc, char** argv) {
  CLI::App app(
      "Draws the runs of --metrics files: one HTML file, which needs no network and no other file.",
      "skim report");
  CommandLine line(app);
  std::vector<fs::path> files;
  fs::path out;
  line.group("Files");
  app.add_option("METRICS", files,
                 "files that skim train --metrics wrote; their runs stand side by side")
      ->required()
      ->group("Files");
  line.plain("--out", out, "FILE.html",
             "the page; an old file is kept beside it as FILE.html.~1~; -: standard output")
      ->required();
  app.footer(
      "skim train --report FILE.html writes the same page while it trains.\n\n"
      "Exit status: 0 success; 1 the page cannot be written; 2 wrong usage or input.\n\n"
      "Example:\n"
      "  skim train --ranks 4 --compare dense,gtopk:0.01 --metrics m.jsonl\n"
      "  skim report m.jsonl --out report.html");
  return parse_and_run(app, argc, argv, [&] { return write_report(files, out); });
}

}  // namespace skim::tool
