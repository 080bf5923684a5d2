#include "tools/report_page.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string_view>
#include <utility>

#include "skim/error.hpp"
#include "skim/version.hpp"
#include "tools/keep_beside.hpp"
#include "tools/report_template.hpp"

namespace fs = std::filesystem;

namespace skim::tool {
namespace {

using nlohmann::json;

constexpr std::chrono::seconds kLiveEvery{5};

// A drawing does not show more digits, and the page is smaller.
json rounded(double x) {
  if (!std::isfinite(x)) return nullptr;
  return std::strtod(fmt::format("{:.7g}", x).c_str(), nullptr);
}

double number_of(const json& record, const char* key) {
  const json& value = record.at(key);
  return value.is_null() ? NAN : value.get<double>();  // null: not finite
}

// Keeps every second element, among them the last one.
template <class T>
void thin(std::vector<T>& all) {
  std::size_t kept = 0;
  for (std::size_t i = (all.size() + 1) % 2; i < all.size(); i += 2) {
    if (kept != i) all[kept] = std::move(all[i]);
    ++kept;
  }
  all.resize(kept);
}

// The name without the characters that reverse the order of the text around it.
std::string in_one_direction(std::string name) {
  constexpr std::string_view kReplacement = "\uFFFD";
  for (const std::string_view mark :
       {"\u061C", "\u200E", "\u200F", "\u202A", "\u202B", "\u202C", "\u202D", "\u202E", "\u2066",
        "\u2067", "\u2068", "\u2069"}) {
    for (std::size_t at = 0; (at = name.find(mark, at)) != std::string::npos;) {
      name.replace(at, mark.size(), kReplacement);
    }
  }
  return name;
}

}  // namespace

// ---- one run ---------------------------------------------------------------------------------

void RecordedRun::Point::merge(const Point& next) {
  step = next.step;
  seconds = next.seconds;
  sent_bytes = next.sent_bytes;
  dense_bytes = next.dense_bytes;
  steps += next.steps;
  skipped += next.skipped;
  for (std::size_t i = 0; i < kKeys.size(); ++i) {
    sums[i] += next.sums[i];
    counts[i] += next.counts[i];
  }
}

RecordedRun::Point RecordedRun::total() const { return points_.empty() ? Point{} : points_.back(); }

void RecordedRun::add(const json& record) {
  if (record.contains("evaluation")) {
    const Point now = total();
    for (const char* key : {"train_loss", "test_loss"}) number_of(record, key);  // may throw
    if (evaluations_.size() == kMostPoints) thin(evaluations_);
    evaluations_.push_back(
        {record.at("step").get<std::int64_t>(), now.seconds, now.sent_bytes, record});
  } else if (record.contains("decision")) {
    (void)record.at("decision").get<std::string>();  // may throw, as the next line
    for (const char* key : {"step", "bucket", "n"}) (void)record.at(key).get<std::int64_t>();
    decisions_.push_back(record);
    if (decisions_.size() <= kMostDecisions) return;
    decisions_.erase(decisions_.begin());
    ++left_out_decisions_;
  } else if (record.contains("compared_ms")) {
    add_comparison(record);
  } else if (record.contains("command")) {
    (void)record.at("command").get<std::string>();  // may throw, as the next line
    (void)record.at("step").get<std::int64_t>();
    beginnings_.push_back(record);
  } else {
    add_step(record);
  }
}

void RecordedRun::add_step(const json& record) {
  const Point now = total();
  Point p;
  p.step = record.at("step").get<std::int64_t>();
  p.seconds = now.seconds + 1e-3 * number_of(record, "step_ms");
  p.sent_bytes = now.sent_bytes + number_of(record, "sent_bytes");
  p.dense_bytes = now.dense_bytes + number_of(record, "dense_bytes");
  p.steps = 1;
  p.skipped = record.at("skipped").get<bool>() ? 1 : 0;
  for (std::size_t i = 0; i < kKeys.size(); ++i) {
    const double x = number_of(record, kKeys[i]);
    p.sums[i] = std::isfinite(x) ? x : 0.0;
    p.counts[i] = std::isfinite(x) ? 1 : 0;
  }
  if (!points_.empty() && points_.back().steps < steps_per_point_) {
    points_.back().merge(p);
    return;
  }
  if (points_.size() == kMostPoints) {
    for (std::size_t i = 0; i < kMostPoints / 2; ++i) {
      points_[i] = points_[2 * i];
      points_[i].merge(points_[2 * i + 1]);
    }
    points_.resize(kMostPoints / 2);
    steps_per_point_ *= 2;
  }
  points_.push_back(p);
}

void RecordedRun::add_comparison(const json& record) {
  const auto waited = record.at("waited_ms").get<std::vector<double>>();
  waited_ms_.resize(std::max(waited_ms_.size(), waited.size()));
  for (std::size_t r = 0; r < waited.size(); ++r) waited_ms_[r] += waited[r];
  compared_ms_ += number_of(record, "compared_ms");
}

void RecordedRun::forget_after(std::int64_t step) {
  std::erase_if(points_, [step](const Point& p) { return p.step > step; });
  std::erase_if(evaluations_, [step](const Evaluation& e) { return e.step > step; });
  std::erase_if(decisions_, [step](const json& d) { return d.at("step") > step; });
}

json RecordedRun::to_json() const {
  json points{{"step", json::array()}, {"seconds", json::array()}, {"sent_bytes", json::array()},
              {"skipped", json::array()}};
  for (const char* key : kKeys) points[key] = json::array();
  Point all;
  for (const Point& p : points_) {
    points["step"].push_back(p.step);
    points["seconds"].push_back(rounded(p.seconds));
    points["sent_bytes"].push_back(rounded(p.sent_bytes));
    points["skipped"].push_back(p.skipped);
    for (std::size_t i = 0; i < kKeys.size(); ++i) {
      points[kKeys[i]].push_back(rounded(p.sums[i] / static_cast<double>(p.counts[i])));
    }
    all.merge(p);
  }
  json means = json::object();
  for (std::size_t i = 0; i < kKeys.size(); ++i) {
    means[kKeys[i]] = rounded(all.sums[i] / static_cast<double>(all.counts[i]));
  }
  json evaluations = json::array();
  for (const Evaluation& e : evaluations_) {
    evaluations.push_back({{"step", e.step},
                           {"seconds", rounded(e.seconds)},
                           {"sent_bytes", rounded(e.sent_bytes)},
                           {"train_loss", e.record.at("train_loss")},
                           {"test_loss", e.record.at("test_loss")},
                           {"test_accuracy", e.record.value("test_accuracy", json())}});
  }
  return {{"beginnings", beginnings_},
          {"steps", all.steps},
          {"skipped", all.skipped},
          {"steps_per_point", steps_per_point_},
          {"sent_bytes", all.sent_bytes},
          {"dense_bytes", all.dense_bytes},
          {"points", std::move(points)},
          {"means", std::move(means)},
          {"evaluations", std::move(evaluations)},
          {"decisions", decisions_},
          {"left_out_decisions", left_out_decisions_},
          {"waited_ms", waited_ms_},
          {"compared_ms", compared_ms_}};
}

// ---- the page --------------------------------------------------------------------------------

void ReportPage::add(const json& record, const std::string& file) {
  if (!record.is_object() || !record.value("run", json()).is_string()) {
    throw InvalidArgument("not an object with the key 'run'");
  }
  const auto run = record.at("run").get<std::string>();
  auto at = std::ranges::find_if(
      runs_, [&](const Named& r) { return r.file == file && r.run == run; });
  if (at == runs_.end()) {
    runs_.push_back({file, run, {}});
    at = runs_.end() - 1;
  }
  try {
    at->recorded.add(record);
  } catch (const json::exception& e) {
    const std::string_view what = e.what();
    throw InvalidArgument("not a record of --metrics: " +
                          std::string(what.substr(std::min(what.size(), what.find("] ") + 2))));
  }
}

bool ReportPage::add_file(const fs::path& path) {
  const auto refuse = [&](const std::string& why) {
    throw InvalidArgument("'" + path.string() + "'" + why +
                          "; expected a file that skim train --metrics wrote");
  };
  std::error_code ignored;
  errno = 0;
  std::ifstream in(path);
  if (!in || fs::is_directory(path, ignored)) {
    throw InvalidArgument("cannot read '" + path.string() +
                          "': " + std::strerror(in ? EISDIR : errno));
  }
  std::string line;
  for (int number = 1; std::getline(in, line); ++number) {
    const json record = json::parse(line, nullptr, false);
    const std::string where = " line " + std::to_string(number) + ": ";
    if (record.is_discarded()) {
      if (in.eof() && number > 1) break;  // incomplete: the run writes it, or was killed
      refuse(where + "not JSON");
    }
    try {
      add(record, path.string());
    } catch (const InvalidArgument& e) {
      refuse(where + e.what());
    }
  }
  return std::ranges::any_of(runs_, [&](const Named& r) {
    return r.file == path.string() && r.recorded.has_steps();
  });
}

void ReportPage::forget_after(const std::string& run, std::int64_t step) {
  for (Named& r : runs_) {
    if (r.run == run) r.recorded.forget_after(step);
  }
}

std::string ReportPage::html(bool is_live) const {
  json runs = json::array();
  for (const Named& r : runs_) {
    const auto same = std::ranges::count(runs_, r.run, &Named::run);
    json run = r.recorded.to_json();
    run["name"] = in_one_direction(same > 1 ? r.file + ": " + r.run : r.run);
    runs.push_back(std::move(run));
  }
  const json data{{"version", SKIM_VERSION}, {"live", is_live}, {"runs", std::move(runs)}};
  // Names are the user's. "<" must not end the element that holds the data.
  std::string text;
  for (const char c : data.dump(-1, ' ', true, json::error_handler_t::replace)) {
    text += c == '<' ? std::string("\\u003c") : std::string(1, c);
  }
  std::string page(kReportTemplate);
  constexpr std::string_view kPlace = "{{data}}";
  return page.replace(page.find(kPlace), kPlace.size(), text);
}

// ---- during a run ----------------------------------------------------------------------------

LiveReport::LiveReport(fs::path path, fs::path metrics, bool goes_on)
    : path_(std::move(path)),
      metrics_(std::move(metrics)),
      written_(std::chrono::steady_clock::now()) {
  if (path_.empty()) return;
  std::error_code ignored;
  if (goes_on && fs::is_regular_file(metrics_, ignored) && fs::file_size(metrics_, ignored) > 0) {
    page_.add_file(metrics_);
  } else {
    keep_beside("--report", path_);
  }
  replace_file("--report", path_, page_.html(true));
}

void LiveReport::add(const json& record) {
  if (path_.empty()) return;
  page_.add(record, metrics_.string());
  if (std::chrono::steady_clock::now() - written_ < kLiveEvery) return;
  replace_file("--report", path_, page_.html(true));
  written_ = std::chrono::steady_clock::now();
}

void LiveReport::forget_after(const std::string& run, std::int64_t step) {
  std::error_code ignored;
  if (path_.empty()) return;
  if (!fs::is_regular_file(metrics_, ignored)) return page_.forget_after(run, step);
  page_ = {};
  page_.add_file(metrics_);
}

void LiveReport::end() {
  if (path_.empty() || has_ended_) return;
  has_ended_ = true;
  replace_file("--report", path_, page_.html(false));
}

LiveReport::~LiveReport() {
  try {
    end();
  } catch (const std::exception&) {  // the run's own failure is what counts
  }
}

}  // namespace skim::tool
