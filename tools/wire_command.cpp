// skim bench wire: measures the size of frames, and the time to write and read them.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "bench/cases.hpp"
#include "bench/index_sets.hpp"
#include "bench/measure.hpp"
#include "codec/index_codes.hpp"
#include "codec/value_codes.hpp"
#include "skim/codec.hpp"
#include "skim/error.hpp"
#include "skim/schedule.hpp"
#include "tools/command_line.hpp"
#include "tools/commands.hpp"
#include "tools/json_file.hpp"

namespace skim::tool {
namespace {

constexpr double kLeastEntries = 1000.0;  // of a set, if no length is given
constexpr Index kMostEntries = std::numeric_limits<Index>::max();  // of a gradient

struct WireOptions {
  std::vector<std::size_t> lengths;
  std::vector<double> densities;
  std::vector<std::string> recorded;
  ValueCode value = ValueCode::f32;
  std::string json;
  double seconds = 0.1;
  bool all_codes = false;
};

struct WireCase {
  std::string source, set;
  SparseBuffer s;
};

struct WireResult {
  IndexCode index = IndexCode::raw32;
  bool chosen = false;
  std::size_t bytes = 0, index_bytes = 0, value_bytes = 0;
  double entropy_bytes = 0.0, encode_ns = 0.0, decode_ns = 0.0;

  double ratio() const { return static_cast<double>(index_bytes) / entropy_bytes; }
};

// A file of --recorded.
WireCase recorded_case(const std::string& file) {
  try {
    return {"recorded", std::filesystem::path(file).stem().string(), bench::read_frame(file)};
  } catch (const Error& e) {
    throw InvalidArgument(std::string("--recorded: ") + e.what() +
                          "; expected a frame, as skim inspect --save-frames writes");
  }
}

// Without options, the cases are uniform sets of the usual length, small sets, and all recorded
// sets.
std::vector<WireCase> cases_of(const WireOptions& o) {
  std::vector<WireCase> list;
  const bool axes_given = !(o.lengths.empty() && o.densities.empty());
  if (axes_given || o.recorded.empty()) {
    const std::vector<double> densities =
        o.densities.empty()
            ? std::vector<double>(bench::kDensities.begin(), bench::kDensities.end())
            : o.densities;
    for (const double d : densities) {
      const std::vector<std::size_t> lengths =
          !o.lengths.empty()
              ? o.lengths
              : std::vector{static_cast<std::size_t>(kLeastEntries / d), bench::kMiddleLength};
      for (const std::size_t n : lengths) {
        list.push_back({"uniform", "", bench::uniform_set(n, entries(d, n), 1)});
      }
    }
  }
  for (const std::string& file : o.recorded) list.push_back(recorded_case(file));
  if (!axes_given && o.recorded.empty()) {
    for (bench::RecordedSet& r : bench::recorded_sets(SKIM_INDEX_SETS)) {
      list.push_back({"recorded", std::move(r.name), std::move(r.s)});
    }
  }
  return list;
}

// Measures medians over warm calls that encode and decode in turn. Throws: Error if the decoded
// entries differ.
WireResult measure(const WireCase& c, const CodecOptions& options, double seconds) {
  const Codec codec(options);
  SparseBuffer s, back;
  s.assign(c.s.view());
  codec.quantize(s, {}, 0);
  const SparseView view = s.view();
  const codes::IndexPlan plan = options.index
                                    ? codes::plan_indices(*options.index, view.index, view.dim)
                                    : codes::cheapest_plan(view.index, view.dim);
  WireResult result{.index = plan.code,
                    .chosen = !options.index,
                    .index_bytes = plan.bytes,
                    .value_bytes = codes::value_bytes(options.value, view.nnz()),
                    .entropy_bytes = bench::entropy_bytes(view.dim, view.nnz())};
  std::vector<std::byte> frame;
  result.bytes = codec.encode(view, nullptr, frame);
  const DecodeResult got = codec.decode(frame, view.dim, back, nullptr);
  const auto bits = [](const SparseView& x) { return std::as_bytes(x.value); };
  if (!got || !std::ranges::equal(back.view().index, view.index) ||
      !std::ranges::equal(bits(back.view()), bits(view))) {
    throw Error(fmt::format("{} n={} k={} {}: the decoded entries differ from the encoded ones",
                            c.source, view.dim, view.nnz(), name_of(plan.code)));
  }
  using Clock = std::chrono::steady_clock;
  const auto ns = [](Clock::duration d) {
    return std::chrono::duration<double, std::nano>(d).count();
  };
  std::vector<double> encode, decode;
  const auto start = Clock::now();
  while (encode.size() < 5 || (encode.size() < 10000 && ns(Clock::now() - start) < 1e9 * seconds)) {
    frame.clear();
    const auto t0 = Clock::now();
    codec.encode(view, nullptr, frame);
    const auto t1 = Clock::now();
    const DecodeResult again = codec.decode(frame, view.dim, back, nullptr);
    const auto t2 = Clock::now();
    if (!again) throw Error("a frame could be decoded once, but not a second time");
    encode.push_back(ns(t1 - t0));
    decode.push_back(ns(t2 - t1));
  }
  result.encode_ns = median(encode);
  result.decode_ns = median(decode);
  return result;
}

nlohmann::json to_json(const WireCase& c, ValueCode value, const WireResult& r) {
  return {{"n", c.s.view().dim},
          {"k", c.s.nnz()},
          {"source", c.source},
          {"set", c.set},
          {"index_code", name_of(r.index)},
          {"chosen", r.chosen},
          {"value_code", name_of(value)},
          {"bytes", r.bytes},
          {"index_bytes", r.index_bytes},
          {"value_bytes", r.value_bytes},
          {"entropy_bytes", r.entropy_bytes},
          {"ratio", r.ratio()},
          {"encode_ns", r.encode_ns},
          {"decode_ns", r.decode_ns}};
}

void print_row(std::FILE* out, const WireCase& c, const WireResult& r) {
  fmt::print(out,
             "{:<24} {:>10} {:>8} {}{:<8} {:>10} {:>10} {:>12.1f} {:>8.3f} {:>11.1f} {:>11.1f}\n",
             c.set.empty() ? c.source : c.set, c.s.view().dim, c.s.nnz(), r.chosen ? '*' : ' ',
             name_of(r.index), r.bytes, r.index_bytes, r.entropy_bytes, r.ratio(),
             1e-3 * r.encode_ns, 1e-3 * r.decode_ns);
  std::fflush(out);
}

int run(const WireOptions& o) {
  for (const double d : o.densities) {
    if (!(d > 0.0 && d < 1.0)) {
      throw InvalidArgument(fmt::format("--density: expected numbers in (0, 1), got {}", d));
    }
    if (o.lengths.empty() && kLeastEntries / d > double{kMostEntries}) {
      throw InvalidArgument(fmt::format(
          "--density {:g}: {:g} / density is more than the {} entries of a frame; give --n", d,
          kLeastEntries, kMostEntries));
    }
  }
  const std::vector<WireCase> list = cases_of(o);
  JsonFile json(o.json);
  std::FILE* const people = o.json == "-" ? stderr : stdout;
  nlohmann::json results = nlohmann::json::array();
  fmt::print(people, "{:<24} {:>10} {:>8} {:<9} {:>10} {:>10} {:>12} {:>8} {:>11} {:>11}\n", "set",
             "n", "k", " index", "bytes", "index", "entropy", "ratio", "encode us", "decode us");
  for (const WireCase& c : list) {
    const auto report = [&](const std::optional<IndexCode>& index) {
      CodecOptions options;
      options.index = index;
      options.value = o.value;
      const WireResult r = measure(c, options, o.seconds);
      print_row(people, c, r);
      results.push_back(to_json(c, o.value, r));
      return r.index;
    };
    const IndexCode chosen = report(std::nullopt);
    if (!o.all_codes) continue;
    for (const IndexCode other : enumerators<IndexCode>()) {
      if (other != chosen) report(other);
    }
  }
  fmt::print(
      people,
      "*: the encoder's choice, which is the smallest code; beyond 4096 entries, huffman must "
      "save a bit\nper entry. index: bytes of the index section. entropy: log2 of the number "
      "of k-subsets of n, in bytes.\nratio: index / entropy. Values: {}.\n",
      name_of(o.value));
  json.write(results);
  return 0;
}

}  // namespace

int bench_wire_command(int argc, char** argv) {
  WireOptions o;
  CLI::App app(
      "Measures the size of frames, compared with the entropy of their index sets, and the time to "
      "encode and decode them.",
      "skim bench wire");
  CommandLine line(app);
  line.group("What is measured (without any of them: uniform sets and the recorded ones)");
  line.plain("--n", o.lengths, "N,...", "entries of the gradient [1000 / density and 25000000]")
      ->delimiter(',')
      ->check(CLI::Range(std::size_t{2}, std::size_t{kMostEntries}));
  line.plain("--density", o.densities, "D,...", "k/n of uniform sets [0.1,0.01,0.001,0.0001]")
      ->delimiter(',');
  line.plain("--recorded", o.recorded, "FILE...",
             "frames of training, as skim inspect --save-frames writes them [" SKIM_INDEX_SETS "]");
  line.choice("--value-code", o.value, "how values are written");
  line.flag("--all-codes", o.all_codes,
            "all index codes, not only the one that the encoder chooses");

  line.group("How");
  line.option("--seconds", o.seconds, "X", "how long to repeat each case")->check(positive());
  line.plain("--json", o.json, "FILE", "JSON array, one object a case; -: standard output");
  app.footer(
      "Example:\n"
      "  skim bench wire --n 25000000 --density 0.001 --all-codes");
  return parse_and_run(app, argc, argv, [&] { return run(o); });
}

}  // namespace skim::tool
