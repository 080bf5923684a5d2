// Prints and writes the numbers of a run.
#include "tools/run_output.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <iterator>
#include <numeric>
#include <optional>
#include <utility>

#include "skim/error.hpp"
#include "skim/version.hpp"
#include "tools/keep_beside.hpp"
#include "tools/launcher.hpp"
#include "train/files.hpp"
#include "train/options_json.hpp"

namespace skim::tool {
namespace {

// As fmt::print, which throws if it cannot write. A run must not end because its log cannot be
// written; the program notices that at its end.
template <class... T>
void print(std::FILE* out, fmt::format_string<T...> format, T&&... values) {
  std::fputs(fmt::format(format, std::forward<T>(values)...).c_str(), out);
}

constexpr std::chrono::milliseconds kLiveEvery{100}, kPlainEvery{10000};

// Without the sign that a NaN may have.
double unsigned_nan(double x) { return std::isnan(x) ? std::fabs(x) : x; }

std::string percent(double fraction) { return fmt::format("{:.2f} %", 100.0 * fraction); }

std::vector<double> in_milliseconds(std::vector<double> seconds) {
  for (double& s : seconds) s *= 1e3;
  return seconds;
}

// JSON cannot represent NaN and infinity, so they become null.
nlohmann::json finite(double x) { return std::isfinite(x) ? nlohmann::json(x) : nlohmann::json(); }

// A line of a metrics file, which may be any JSON.
struct Line {
  std::string text;
  std::optional<std::int64_t> step;  // none: not of the run that is looked at
  bool is_evaluation = false, is_beginning = false;
  int ranks = 0;  // of a beginning
};

Line line_of(std::string text, const nlohmann::json& j, const std::string& run) {
  Line line;
  line.text = std::move(text);
  if (!j.is_object() || j.value("run", nlohmann::json()) != run) return line;
  const nlohmann::json step = j.value("step", nlohmann::json());
  const nlohmann::json ranks = j.value("ranks", nlohmann::json());
  if (step.is_number()) line.step = step.get<std::int64_t>();
  if (ranks.is_number()) line.ranks = ranks.get<int>();
  line.is_evaluation = j.contains("evaluation");
  line.is_beginning = j.contains("command");
  return line;
}

}  // namespace

std::string human_bytes(double bytes) {
  static constexpr std::array kUnits{"B", "kB", "MB", "GB", "TB"};
  std::size_t unit = 0;
  while (bytes >= 999.5 && unit + 1 < kUnits.size()) {
    bytes /= 1000.0;
    ++unit;
  }
  return unit == 0 ? fmt::format("{:.0f} B", bytes) : fmt::format("{:.3g} {}", bytes, kUnits[unit]);
}

std::string human_seconds(double s) {
  if (!std::isfinite(s) || s < 0.0) return "-";
  const auto whole = static_cast<long long>(s + 0.5);
  if (whole < 60) return fmt::format("{} s", whole);
  if (whole < 3600) return fmt::format("{}:{:02} min", whole / 60, whole % 60);
  return fmt::format("{}:{:02} h", whole / 3600, whole % 3600 / 60);
}

MetricsFile::MetricsFile(const std::filesystem::path& path, bool keep_existing,
                         std::atomic<bool>& stop, const std::filesystem::path& report,
                         const std::filesystem::path& tensorboard)
    : path_(path),
      stop_(stop),
      report_(report, path == "-" ? std::filesystem::path() : path, keep_existing),
      events_(tensorboard, keep_existing) {
  if (path.empty()) return;
  if (path == "-") {
    file_ = stdout;
    return;
  }
  if (!keep_existing) keep_beside("--metrics", path);
  owned_.reset(std::fopen(path.c_str(), keep_existing ? "a" : "w"));
  file_ = owned_.get();
  if (file_ == nullptr) {
    throw InvalidArgument("--metrics: cannot open '" + path.string() +
                          "': " + std::strerror(errno));
  }
}

void MetricsFile::write(const nlohmann::json& line) {
  if (!failure_.empty()) return;
  try {
    write_all(line);
  } catch (const InvalidArgument&) {
    throw;
  } catch (const Error& e) {
    failure_ = e.what();
    stop_.store(true);
  }
}

void MetricsFile::write_all(const nlohmann::json& line) {
  report_.add(line);
  events_.add(line);
  if (file_ == nullptr) return;
  const std::string text = train::json_text(line) + "\n";
  if (std::fwrite(text.data(), 1, text.size(), file_) != text.size() || std::fflush(file_) != 0) {
    throw Error("--metrics: cannot write '" + path_.string() + "': " + std::strerror(errno));
  }
}

void MetricsFile::end() { report_.end(); }

void MetricsFile::forget_after(const std::string& run, const train::Resumed& from) {
  events_.forget_after(run, from);
  rewrite_until(run, from);
  report_.forget_after(run, from.step);
}

void MetricsFile::rewrite_until(const std::string& run, const train::Resumed& from) {
  std::error_code ignored;
  if (!std::filesystem::is_regular_file(path_, ignored) || owned_ == nullptr) return;
  std::ifstream in(path_);
  std::vector<Line> lines;
  for (std::string text; std::getline(in, text);) {
    const nlohmann::json j = nlohmann::json::parse(text, nullptr, false);
    if (j.is_discarded() && in.eof()) continue;  // incomplete, from when the run was stopped
    lines.push_back(line_of(text, j, run));
  }
  in.close();
  // The last process that can have saved the checkpoint did. None: it wrote no metrics.
  const auto saver = std::find_if(lines.rbegin(), lines.rend(), [&](const Line& line) {
    return line.is_beginning && line.step && *line.step <= from.saved_step &&
           line.ranks == from.saved_ranks;
  });
  const auto after_saver = saver == lines.rend() ? lines.end() : saver.base();
  std::string kept;
  bool is_later = false;  // of a process after that one
  for (auto line = lines.begin(); line != lines.end(); ++line) {
    if (line->step) {
      is_later = is_later || (line >= after_saver && line->is_beginning);
      if (is_later || *line->step > from.saved_step) continue;
      if (line->is_evaluation && *line->step > from.saved_evaluation) continue;
    }
    kept += line->text + "\n";
  }
  replace_file("--metrics", path_, kept);
  owned_.reset(std::fopen(path_.c_str(), "a"));
  file_ = owned_.get();
  if (file_ == nullptr) {
    throw Error("--metrics: cannot write '" + path_.string() + "': " + std::strerror(errno));
  }
}

nlohmann::json to_json(const std::string& run, const train::StepRecord& r) {
  return {{"run", run},
          {"step", r.step},
          {"epoch", r.epoch},
          {"loss", finite(r.loss)},
          {"lr", r.learning_rate},
          {"density", r.density},
          {"budget_spent", r.budget_spent >= 0.0 ? nlohmann::json(r.budget_spent) : nullptr},
          {"n", r.n},
          {"k", r.k},
          {"sent_entries", r.sent_entries},
          {"sum_entries", r.sum_entries},
          {"sent_bytes", r.sent_bytes},
          {"received_bytes", r.received_bytes},
          {"dense_bytes", r.dense_bytes},
          {"threshold", finite(r.threshold)},
          {"capture", finite(r.capture)},
          {"residual_norm", finite(r.residual_norm)},
          {"skipped", r.skipped},
          {"step_ms", r.step_ms},
          {"compute_ms", r.compute_ms},
          {"select_ms", r.select_ms},
          {"exchange_ms", r.exchange_ms},
          {"apply_ms", r.apply_ms},
          {"exposed_ms", r.exposed_ms},
          {"optimizer_ms", r.optimizer_ms}};
}

nlohmann::json to_json(const std::string& run, const train::Evaluation& e, bool text) {
  nlohmann::json j{{"run", run},
                   {"evaluation", true},
                   {"step", e.step},
                   {"epoch", e.epoch},
                   {"train_loss", finite(e.train_loss)},
                   {"test_loss", finite(e.test_loss)}};
  if (!text) j["test_accuracy"] = e.test_accuracy;
  return j;
}

nlohmann::json beginning_json(const Row& row, std::int64_t step, int ranks,
                              const std::string& command) {
  return {{"run", row.name},
          {"step", step},
          {"ranks", ranks},
          {"model", row.options.model},
          {"data", row.options.data.name},
          {"version", SKIM_VERSION},
          {"command", command}};
}

nlohmann::json comparison_json(const std::string& run, std::int64_t step,
                               std::span<const double> waited_s, double seconds) {
  return {{"run", run},
          {"step", step},
          {"waited_ms", in_milliseconds({waited_s.begin(), waited_s.end()})},
          {"compared_ms", 1e3 * seconds}};
}

Progress::Progress(std::FILE* out, std::string run, bool text)
    : out_(out),
      on_terminal_(columns() > 0),
      run_(std::move(run)),
      text_(text),
      started_(std::chrono::steady_clock::now()) {}

int Progress::columns() const { return terminal_columns(out_ == stderr); }

std::string Progress::line(const train::StepRecord& r) const {
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - started_).count();
  const auto steps = static_cast<double>(r.step - first_step_);
  const double left =
      steps > 0 ? seconds / steps * static_cast<double>(r.total_steps - r.step) : NAN;
  return fmt::format(
      "{}  step {}/{}  left {}  epoch {:.2f}  loss {:.4f}{}  density {:.4g}{}  saved {}", run_, r.step,
      r.total_steps, human_seconds(left), r.epoch, unsigned_nan(r.loss), quality_, r.density,
      r.budget_spent >= 0.0 ? "  budget " + percent(r.budget_spent) : std::string(),
      human_bytes(static_cast<double>(saved_bytes_)));
}

void Progress::step(const train::StepRecord& r) {
  const auto now = std::chrono::steady_clock::now();
  if (first_step_ < 0) first_step_ = r.step - 1;
  saved_bytes_ += r.dense_bytes > r.sent_bytes ? r.dense_bytes - r.sent_bytes : 0;
  if (now - shown_ < (on_terminal_ ? kLiveEvery : kPlainEvery) && r.step < r.total_steps) return;
  shown_ = now;
  if (on_terminal_) {
    // The line leaves the cursor at its first letter. If the terminal then gets narrower and wraps
    // the line, all rows are at or below the cursor, so kEraseLive removes them. Without automatic
    // wrapping (DECAWM, 7), a line that is on its way when the terminal gets narrower cannot wrap.
    print(out_, "{}\x1b[?7l{:.{}}{}{}", kEraseLive, line(r), std::max(columns(), 1) - 1, kEndOfLive,
          is_launched_by_skim() ? "\n" : "");
    is_drawn_ = true;
  } else {
    print(out_, "{}\n", line(r));
  }
  std::fflush(out_);
}

void Progress::evaluated(const train::Evaluation& e) {
  quality_ = text_ ? fmt::format("  test loss {:.4f}", unsigned_nan(e.test_loss))
                   : fmt::format("  accuracy {}", percent(e.test_accuracy));
  say(fmt::format("epoch {:.2f}  train loss {:.4f}  test loss {:.4f}{}", e.epoch,
                  unsigned_nan(e.train_loss), unsigned_nan(e.test_loss),
                  text_ ? std::string() : fmt::format("  accuracy {}", percent(e.test_accuracy))));
}

void Progress::say(const std::string& what) {
  end();
  print(out_, "{}  {}\n", run_, what);
  std::fflush(out_);
}

void Progress::warn(const std::string& what) {
  end();
  print(stderr, "skim: {}: {}\n", run_, what);
}

void Progress::end() {
  if (is_drawn_) print(out_, "{}", kEraseLive);
  is_drawn_ = false;
  std::fflush(out_);
}

train::OnDecision decisions_to(MetricsFile& metrics, Progress& progress, const std::string& run) {
  return [&metrics, &progress, run](std::int64_t step, Slot slot, std::size_t n,
                                    std::string_view why) {
    metrics.write({{"run", run}, {"decision", why}, {"step", step}, {"bucket", slot}, {"n", n}});
    progress.say(fmt::format("step {}  bucket {} ({} entries): {}", step, slot, n, why));
  };
}

std::string divergence_of(const Row& row) {
  const train::TrainOptions& o = row.options;
  const double loss = row.summary.last.test_loss;
  const bool may_be = o.skip_limit == 0 || o.non_finite == NonFinite::pass_on;
  if (!row.summary.evaluated() || std::isfinite(loss) || may_be) return {};
  return fmt::format(
      "{}: the test loss is {} after step {}: the run has diverged; lower --lr or clip (--clip-norm)",
      row.name, unsigned_nan(loss), row.summary.last.step);
}

namespace {

// The options as JSON, with the values that the run derived from other options. "derived" lists
// their names.
nlohmann::json effective(train::TrainOptions o, const train::Summary& s) {
  nlohmann::json derived = nlohmann::json::array();
  if (!o.memory) {
    o.memory = train::memory_of(o);
    derived.push_back("memory");
  }
  if (train::is_adaptive(o) && !o.adaptive_form) {
    o.adaptive_form = train::form_of(o);
    derived.push_back("adaptive_form");
  }
  if (train::is_dense(o)) {
    o.density = 1.0;
    derived.push_back("density");
  }
  derived.push_back(o.steps > 0 ? "epochs" : "steps");
  o.steps = s.length.total;
  o.epochs = s.length.epoch(s.length.total);
  nlohmann::json all = train::options_json(o);
  all["derived"] = std::move(derived);
  return all;
}

}  // namespace

nlohmann::json to_json(const Row& row, int ranks) {
  const train::Summary& s = row.summary;
  const bool text = row.options.data.name == "text";
  const auto quality = [&](double x) { return s.evaluated() ? finite(x) : nlohmann::json(); };
  nlohmann::json j = effective(row.options, s);
  j.update({{"run", row.name},
            {"ranks", ranks},
            {"parameters", s.parameters},
            {"steps_done", s.steps},
            {"stopped", s.stopped},
            {"skipped_steps", s.skipped_steps},
            {"rollbacks", s.rollbacks},
            {"waited_ms", in_milliseconds(s.waited_s)},
            {"compared_ms", 1e3 * s.compared_s},
            {"train_loss", quality(s.last.train_loss)},
            {"test_loss", quality(s.last.test_loss)},
            {"sent_bytes_per_step", s.sent_bytes_per_step},
            {"received_bytes_per_step", s.received_bytes_per_step},
            {"max_sent_bytes_per_step", s.max_sent_bytes_per_step},
            {"max_received_bytes_per_step", s.max_received_bytes_per_step},
            {"dense_bytes_per_step", s.dense_bytes_per_step},
            {"union_entries_per_step", s.union_entries_per_step},
            {"step_ms", s.median.step_ms},
            {"compute_ms", s.median.compute_ms},
            {"select_ms", s.median.select_ms},
            {"exchange_ms", s.median.exchange_ms},
            {"apply_ms", s.median.apply_ms},
            {"exposed_ms", s.median.exposed_ms},
            {"optimizer_ms", s.median.optimizer_ms},
            {"peak_rss_bytes", s.peak_rss_bytes}});
  if (s.choices) j["choices"] = train::choices_json(*s.choices);
  if (!text) j["test_accuracy"] = quality(s.last.test_accuracy);
  return j;
}

namespace {

// Which ranks the others waited for. Empty: that was not worth a line.
std::string line_on_waiting(const train::Summary& s) {
  constexpr double kShare = 0.05, kSeconds = 0.1;
  const double all = std::accumulate(s.waited_s.begin(), s.waited_s.end(), 0.0);
  if (!(all > kShare * s.compared_s) || all < kSeconds) return {};
  std::string of_ranks;
  for (std::size_t r = 0; r < s.waited_s.size(); ++r) {
    if (s.waited_s[r] < 0.1 * all) continue;
    of_ranks += fmt::format("{}rank {} {:.1f} s", of_ranks.empty() ? "" : ", ", r, s.waited_s[r]);
  }
  return fmt::format("the ranks waited for slower ones in {:.1f} of {:.1f} s: {}", all,
                     s.compared_s, of_ranks);
}

// The least milliseconds of a step on a link of that rate: local work as measured and all bytes,
// without latency, and with nothing hidden.
double least_step_ms(const train::Summary& s, double bits_per_s) {
  return s.median.compute_ms + s.median.select_ms + s.median.apply_ms +
         8e3 * s.sent_bytes_per_step / bits_per_s;
}

// Whether this process has taken a step of the run.
bool is_trained(const Row& row) { return row.summary.median.step_ms > 0.0; }

// What --compare says in the end: how long steps take in comparison, here and on slower links.
// rows: the trained ones.
void print_conclusion(std::FILE* out, const std::vector<Row>& rows, bool text) {
  const auto dense =
      std::ranges::find_if(rows, [](const Row& r) { return train::is_dense(r.options); });
  const Row& base = dense != rows.end() ? *dense : rows.front();
  const auto ratio = [](double x, double y) {
    return y > 0.0 ? fmt::format("{:.2f}", x / y) : std::string("-");
  };
  print(out,
             "\nStep time relative to {}: here; and at 1 Gbit/s and 100 Mbit/s, from work and bytes "
             "alone\n",
             base.name);
  for (const Row& row : rows) {
    if (&row == &base) continue;
    const train::Summary &s = row.summary, &b = base.summary;
    print(out, "{}: {} here, {} at 1 Gbit/s, {} at 100 Mbit/s\n", row.name,
               ratio(s.median.step_ms, b.median.step_ms),
               ratio(least_step_ms(s, 1e9), least_step_ms(b, 1e9)),
               ratio(least_step_ms(s, 1e8), least_step_ms(b, 1e8)));
  }
  const Row& fastest = *std::ranges::min_element(
      rows, {}, [](const Row& r) { return r.summary.median.step_ms; });
  print(out, "{} was the fastest here. Each {} is of one seed: choose by several (--seed).\n",
             fastest.name, text ? "loss" : "accuracy");
}

}  // namespace

void print_heading(std::FILE* out, const train::TrainOptions& o, const train::Summary& s,
                   int ranks) {
  print(out, "\n{} on {}: {} parameters, {} rank{}, batch {} a rank, {} steps\n", o.model,
        o.data.name, s.parameters, ranks, ranks == 1 ? "" : "s", o.batch, s.steps);
}

void print_table(std::FILE* out, const std::vector<Row>& rows, int ranks, bool text) {
  if (rows.empty()) return;
  print_heading(out, rows.front().options, rows.front().summary, ranks);
  std::vector<std::array<std::string, 11>> cells;
  cells.push_back({"run", "train loss", text ? "test loss" : "accuracy", "sent/step", "of dense",
                   "step ms", "compute", "select", "exchange", "apply", "exposed"});
  for (const Row& row : rows) {
    const train::Summary& s = row.summary;
    // Not of a run that was done when it was resumed.
    const auto if_trained = [&row](std::string cell) {
      return is_trained(row) ? std::move(cell) : "-";
    };
    const auto ms = [&](double x) { return if_trained(fmt::format("{:.2f}", x)); };
    cells.push_back(
        {row.name, s.evaluated() ? fmt::format("{:.4f}", unsigned_nan(s.last.train_loss)) : "-",
         !s.evaluated() ? "-"
         : text         ? fmt::format("{:.4f}", unsigned_nan(s.last.test_loss))
                        : percent(s.last.test_accuracy),
         if_trained(human_bytes(s.sent_bytes_per_step)),
         s.dense_bytes_per_step > 0.0 && is_trained(row)
             ? fmt::format("{:.3g} %", 100.0 * s.sent_bytes_per_step / s.dense_bytes_per_step)
             : "-",
         ms(s.median.step_ms), ms(s.median.compute_ms), ms(s.median.select_ms),
         ms(s.median.exchange_ms), ms(s.median.apply_ms), ms(s.median.exposed_ms)});
  }
  std::array<std::size_t, 11> width{};
  for (const auto& line : cells) {
    for (std::size_t c = 0; c < line.size(); ++c) width[c] = std::max(width[c], line[c].size());
  }
  for (const auto& line : cells) {
    std::string joined;
    for (std::size_t c = 0; c < line.size(); ++c) {
      joined += c == 0 ? fmt::format("{:<{}}", line[c], width[c])
                       : fmt::format("  {:>{}}", line[c], width[c]);
    }
    print(out, "{}\n", joined);
  }
  print(
      out,
      "sent/step: bytes per rank and step, mean over ranks. Times: medians on rank 0, in ms; "
      "select, exchange\nand apply run beside compute, exposed is what backward did not hide "
      "of them.\n");
  for (const Row& row : rows) {
    const train::Summary& s = row.summary;
    if (s.skipped_steps == 0) continue;
    print(out, "{}: {} of {} steps were skipped, because gradients were NaN or infinite\n",
               row.name, s.skipped_steps, s.steps);
  }
  for (const Row& row : rows) {
    const std::string line = line_on_waiting(row.summary);
    if (!line.empty()) print(out, "{}: {}\n", row.name, line);
  }
  std::vector<Row> trained;
  std::ranges::copy_if(rows, std::back_inserter(trained), is_trained);
  if (trained.size() > 1) print_conclusion(out, trained, text);
  std::fflush(out);
}

}  // namespace skim::tool
