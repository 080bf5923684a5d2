#include "tools/event_files.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <istream>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "skim/error.hpp"
#include "tools/keep_beside.hpp"

namespace fs = std::filesystem;

namespace skim::tool {
namespace {

// Keys of --metrics and their tags. Tags that begin with "skim/" are those of skim.attach(writer=),
// where it has the quantity (Report.scalars in python/skim/_report.py).
constexpr std::array<std::pair<const char*, const char*>, 18> kTags{{
    {"loss", "train/loss"},
    {"lr", "train/lr"},
    {"epoch", "train/epoch"},
    {"train_loss", "train/mean_loss"},
    {"test_loss", "test/loss"},
    {"test_accuracy", "test/accuracy"},
    {"density", "skim/density"},
    {"budget_spent", "skim/budget_spent"},
    {"threshold", "skim/threshold"},
    {"capture", "skim/captured"},
    {"residual_norm", "skim/residual_norm"},
    {"step_ms", "skim/step_ms"},
    {"compute_ms", "skim/compute_ms"},
    {"exposed_ms", "skim/exposed_ms"},
    {"optimizer_ms", "skim/optimizer_ms"},
    {"select_ms", "skim/select_ms"},
    {"exchange_ms", "skim/exchange_ms"},
    {"apply_ms", "skim/apply_ms"},
}};
constexpr const char *kSent = "skim/sent_bytes", *kCompression = "skim/compression",
                     *kSkipped = "skim/steps_taken_back";
constexpr const char* kInName = "tfevents";  // TensorBoard reads files that have it in their name

std::string little_endian(std::uint64_t x, int bytes) {
  std::string text;
  for (int i = 0; i < bytes; ++i) text += static_cast<char>(x >> (8 * i) & 0xFF);
  return text;
}

// ---- protocol buffers -------------------------------------------------------------------------

constexpr int kVarint = 0, kFixed64 = 1, kBytes = 2, kFixed32 = 5;
// The fields of an Event, of its Summary, of a Value there, and of a SessionLog.
constexpr int kWallTime = 1, kStep = 2, kFileVersion = 3, kSummary = 5, kSessionLog = 7;
constexpr int kValue = 1, kTag = 1, kSimpleValue = 2;
constexpr int kStatus = 1, kStart = 1;

std::string varint(std::uint64_t x) {
  std::string text;
  for (; x >= 0x80; x >>= 7) text += static_cast<char>((x & 0x7F) | 0x80);
  return text += static_cast<char>(x);
}

std::string field(int number, int type, const std::string& content) {
  return varint(static_cast<std::uint64_t>(number << 3 | type)) + content;
}
std::string field(int number, std::int64_t x) {
  return field(number, kVarint, varint(static_cast<std::uint64_t>(x)));
}
std::string field(int number, double x) {
  return field(number, kFixed64, little_endian(std::bit_cast<std::uint64_t>(x), 8));
}
std::string field(int number, float x) {
  return field(number, kFixed32, little_endian(std::bit_cast<std::uint32_t>(x), 4));
}
std::string field(int number, std::string_view x) {
  return field(number, kBytes, varint(x.size()) + std::string(x));
}

struct Field {
  int number = 0;
  std::uint64_t value = 0;  // unless it has bytes
  std::string_view bytes;
};

// Takes `size` bytes from the front. Empty: there are fewer.
std::string_view take(std::string_view& from, std::uint64_t size) {
  if (size > from.size()) return from = {};
  const std::string_view taken = from.substr(0, size);
  from.remove_prefix(size);
  return taken;
}
std::uint64_t take_number(std::string_view& from, std::uint64_t size) {
  std::uint64_t x = 0;
  int shift = 0;
  for (const char c : take(from, size)) {
    x |= std::uint64_t{static_cast<unsigned char>(c)} << shift;
    shift += 8;
  }
  return x;
}
std::uint64_t take_varint(std::string_view& from) {
  std::uint64_t x = 0;
  for (int shift = 0; shift < 64 && !from.empty(); shift += 7) {
    const std::uint64_t byte = take_number(from, 1);
    x |= (byte & 0x7F) << shift;
    if (byte < 0x80) break;
  }
  return x;
}

// The fields of a message that this file has written.
std::vector<Field> fields_of(std::string_view message) {
  std::vector<Field> fields;
  while (!message.empty()) {
    const std::uint64_t key = take_varint(message);
    Field& f = fields.emplace_back();
    f.number = static_cast<int>(key >> 3);
    switch (key & 7) {
      case kFixed64: f.value = take_number(message, 8); break;
      case kFixed32: f.value = take_number(message, 4); break;
      case kBytes: f.bytes = take(message, take_varint(message)); break;
      default: f.value = take_varint(message);
    }
  }
  return fields;
}

// ---- records ----------------------------------------------------------------------------------

// The CRC-32C of each byte: polynomial 0x1EDC6F41, reflected.
constexpr std::array<std::uint32_t, 256> kCrcs = [] {
  std::array<std::uint32_t, 256> table{};
  for (std::uint32_t i = 0; i < table.size(); ++i) {
    std::uint32_t crc = i;
    for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ ((crc & 1) != 0 ? 0x82F63B78U : 0U);
    table[i] = crc;
  }
  return table;
}();

// A record has the CRC rotated and with a constant added, so that it can hold data with CRCs.
std::uint32_t masked_crc(std::string_view data) {
  std::uint32_t crc = ~0U;
  for (const char c : data) crc = crc >> 8 ^ kCrcs[(crc ^ static_cast<unsigned char>(c)) & 0xFF];
  return std::rotr(~crc, 15) + 0xA282EAD8U;
}

std::string record_of(const std::string& data) {
  const std::string length = little_endian(data.size(), 8);
  return length + little_endian(masked_crc(length), 4) + data + little_endian(masked_crc(data), 4);
}

// Reads the next record. False: there is no more, or it is damaged, or was not written to its end.
bool read_record(std::istream& in, std::string& data) {
  std::string header(12, '\0'), end(4, '\0');
  if (!in.read(header.data(), 12)) return false;
  std::string_view rest = header;
  std::string_view length = take(rest, 8);
  if (take_number(rest, 4) != masked_crc(length)) return false;
  data.resize(take_number(length, 8));
  in.read(data.data(), static_cast<std::streamsize>(data.size()));
  if (!in.read(end.data(), 4)) return false;
  rest = end;
  return take_number(rest, 4) == masked_crc(data);
}

// ---- events -----------------------------------------------------------------------------------

// Part of an event. The tags lie in its bytes.
struct Scalars {
  std::int64_t step = 0;
  std::vector<std::pair<std::string_view, double>> values;
};

Scalars scalars_of(std::string_view event) {
  Scalars found;
  for (const Field& of_event : fields_of(event)) {
    if (of_event.number == kStep) found.step = static_cast<std::int64_t>(of_event.value);
    if (of_event.number != kSummary) continue;
    for (const Field& of_summary : fields_of(of_event.bytes)) {
      auto& [tag, x] = found.values.emplace_back();
      for (const Field& f : fields_of(of_summary.bytes)) {
        if (f.number == kTag) tag = f.bytes;
        if (f.number == kSimpleValue) x = std::bit_cast<float>(static_cast<std::uint32_t>(f.value));
      }
    }
  }
  return found;
}

double now_s() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

std::string event(std::int64_t step, int number, const std::string& content) {
  return field(kWallTime, now_s()) + field(kStep, step) +
         field(number, std::string_view(content));
}

std::string value(std::string_view tag, double x) {
  const std::string content = field(kTag, tag) + field(kSimpleValue, static_cast<float>(x));
  return field(kValue, std::string_view(content));
}

// The event files of a folder, in the order in which they were begun.
std::vector<fs::path> files_in(const fs::path& folder) {
  std::vector<fs::path> files;
  std::error_code ignored;  // a folder that does not exist has none
  for (const fs::directory_entry& e : fs::directory_iterator(folder, ignored)) {
    if (e.path().filename().string().find(kInName) != std::string::npos) files.push_back(e.path());
  }
  std::ranges::sort(files);
  return files;
}

// The events of one step of a run.
struct StepEvents {
  std::string training;     // the last one; empty: there is none
  bool evaluation = false;  // there is one
};

StepEvents events_of_step(const fs::path& folder, std::int64_t step) {
  StepEvents events;
  for (const fs::path& file : files_in(folder)) {
    std::ifstream in(file, std::ios::binary);
    for (std::string data; read_record(in, data);) {
      const Scalars found = scalars_of(data);
      if (found.step != step || found.values.empty()) continue;
      if (std::ranges::any_of(found.values, [](const auto& v) { return v.first == kSent; })) {
        events.training = data;
      } else {
        events.evaluation = true;
      }
    }
  }
  return events;
}

}  // namespace

EventFiles::EventFiles(fs::path folder, bool goes_on)
    : folder_(std::move(folder)), goes_on_(goes_on) {}

// The latest events count, because those of a run that goes on void older ones.
EventFiles::Totals EventFiles::totals_until(const fs::path& folder, std::int64_t step) {
  double sent = 0.0, compression = 1.0, skipped = 0.0;
  for (const fs::path& file : files_in(folder)) {
    std::ifstream in(file, std::ios::binary);
    for (std::string data; read_record(in, data);) {
      const Scalars found = scalars_of(data);
      if (found.step > step) continue;
      for (const auto& [tag, x] : found.values) {
        if (tag == kSent) sent = x;
        if (tag == kCompression) compression = x;
        if (tag == kSkipped) skipped = x;
      }
    }
  }
  return {.sent_bytes = sent, .dense_bytes = compression * sent, .skipped = skipped};
}

void EventFiles::open(const std::string& run) {
  if (run == run_) return;
  run_ = run;
  totals_ = {};
  const fs::path folder = folder_ / run;
  if (!goes_on_ && !files_in(folder).empty()) put_beside("--tensorboard", folder);
  std::error_code ignored;  // then the file cannot be opened
  fs::create_directories(folder, ignored);
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  const auto ns = std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
  path_ = folder / fmt::format("events.out.{}.{}.{:09}", kInName, ns / 1'000'000'000,
                               ns % 1'000'000'000);
  errno = 0;
  out_ = std::ofstream(path_, std::ios::binary);
  if (!out_) {
    throw InvalidArgument("--tensorboard: cannot open '" + path_.string() +
                          "': " + std::strerror(errno));
  }
  write(field(kWallTime, now_s()) + field(kFileVersion, std::string_view("brain.Event:2")));
}

void EventFiles::write(const std::string& event) {
  errno = 0;
  if (out_ << record_of(event) << std::flush) return;
  throw Error("--tensorboard: cannot write '" + path_.string() +
              "': " + std::strerror(errno != 0 ? errno : EIO));
}

void EventFiles::add(const nlohmann::json& record) {
  if (folder_.empty()) return;
  open(record.at("run").get<std::string>());
  std::string values;
  for (const auto& [key, tag] : kTags) {
    const auto at = record.find(key);
    if (at != record.end() && at->is_number()) values += value(tag, at->get<double>());
  }
  if (record.contains("sent_bytes")) {
    totals_.sent_bytes += record.at("sent_bytes").get<double>();
    totals_.dense_bytes += record.at("dense_bytes").get<double>();
    totals_.skipped += record.at("skipped").get<bool>() ? 1.0 : 0.0;
    values += value(kSent, totals_.sent_bytes);
    values += value(kCompression, totals_.sent_bytes > 0.0
                                      ? totals_.dense_bytes / totals_.sent_bytes
                                      : 1.0);
    values += value(kSkipped, totals_.skipped);
  }
  if (!values.empty()) write(event(record.at("step").get<std::int64_t>(), kSummary, values));
}

void EventFiles::forget_after(const std::string& run, const train::Resumed& from) {
  if (folder_.empty()) return;
  open(run);
  totals_ = totals_until(folder_ / run, from.saved_step);
  // A session that starts at a step voids the events from that step on. More ranks count on from a
  // smaller number: then older events that have the numbers of steps to come go, too.
  const std::int64_t last = std::min(from.step, from.saved_step);
  // An evaluation after the checkpoint comes again. So the old one goes, too.
  const bool comes_again = from.saved_evaluation < last && last == from.saved_step;
  const StepEvents events = comes_again ? events_of_step(folder_ / run, last) : StepEvents();
  write(event(events.evaluation ? last : last + 1, kSessionLog,
              field(kStatus, std::int64_t{kStart})));
  if (events.evaluation && !events.training.empty()) write(events.training);
}

}  // namespace skim::tool
