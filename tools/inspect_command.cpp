// skim inspect: measures the vectors that rules select from, and the error of the selection, during
// training or on saved gradients.
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <nlohmann/json.hpp>
#include <optional>

#include "skim/analysis.hpp"
#include "skim/codec.hpp"
#include "skim/error.hpp"
#include "tools/commands.hpp"
#include "tools/keep_beside.hpp"
#include "tools/npy.hpp"
#include "tools/train_command.hpp"
#include "train/files.hpp"
#include "train/options_json.hpp"

namespace skim::tool {
namespace {

constexpr double kHistogramWidth = 5.0;  // standard deviations to each side

struct InspectOptions {
  std::vector<std::string> files;
  std::int64_t every = 100;
  std::int64_t bins = 101;
  std::filesystem::path out = "inspect";
  std::string pictures = "png";
  bool save = false, save_frames = false;
};

// Counts how often a measured ratio was within a bound.
struct Verdict {
  int held = 0, of = 0;
  double closest = 0.0;  // the largest ratio / bound

  void add(double ratio, double bound) {
    ++of;
    held += ratio <= bound ? 1 : 0;
    closest = std::max(closest, ratio / bound);
  }
};

// Measures vectors u. docs/metrics.md describes the JSON that it returns.
class Inspector {
 public:
  // select: the options of the rules. Its `rule` is ignored: every rule is measured.
  Inspector(const InspectOptions& options, const SelectOptions& select)
      : bins_(static_cast<std::size_t>(options.bins)) {
    for (const SelectRule rule : enumerators<SelectRule>()) {
      SelectOptions one = select;
      one.rule = rule;
      one.per_parameter = false;
      // A fixed threshold of 0 would select everything.
      if (one.rule == SelectRule::threshold && !(one.threshold > 0.0F)) continue;
      selectors_.push_back(make_selector(one));
    }
  }

  // name: the name of the parameter, or "model". id.slot: 0 for the model, and another number for
  // each parameter. Selectors keep their state under this slot. k: entries to keep, at most
  // u.size().
  nlohmann::json measure(const std::string& name, std::span<const float> u, std::size_t k,
                         StepId id) {
    const double kappa = static_cast<double>(k) / static_cast<double>(u.size());
    const double ratio = analysis::top_k_ratio(u, k);
    (id.slot == 0 ? model_ : parameters_).add(ratio, analysis::bell_bound(kappa));
    const analysis::Moments m = analysis::moments(u);
    const double width = m.std > 0.0 ? kHistogramWidth * m.std : 1.0;
    const analysis::Histogram h = analysis::histogram(u, -width, width, bins_);
    nlohmann::json selectors = nlohmann::json::array();
    for (const auto& s : selectors_) selectors.push_back(select(*s, u, k, id));
    return {{"name", name},
            {"n", u.size()},
            {"k", k},
            {"mean", m.mean},
            {"std", m.std},
            {"skewness", m.skewness},
            {"excess_kurtosis", m.excess_kurtosis},
            {"distance_from_unimodal", analysis::distance_from_unimodal(u)},
            {"ratio", ratio},
            {"general_bound", analysis::general_bound(kappa)},
            {"bell_bound", analysis::bell_bound(kappa)},
            {"unimodal_bound", analysis::unimodal_bound(kappa)},
            {"normal_ratio", analysis::normal_ratio(kappa)},
            {"laplace_ratio", analysis::laplace_ratio(kappa)},
            {"histogram",
             {{"low", h.low},
              {"high", h.high},
              {"below", h.below},
              {"above", h.above},
              {"count", h.count}}},
            {"cumulative", analysis::cumulative(h)},
            {"selectors", std::move(selectors)}};
  }

  const Verdict& model() const noexcept { return model_; }
  const Verdict& parameters() const noexcept { return parameters_; }

 private:
  nlohmann::json select(Selector& selector, std::span<const float> u, std::size_t k, StepId id) {
    copy_.assign(u.begin(), u.end());
    const SelectReport report = selector.select({.id = id,
                                                 .grad = std::span<float>(copy_),
                                                 .residual = {},
                                                 .layout = {},
                                                 .keep = {.k = k, .threshold = 0.0F, .k_down = 0}},
                                                selected_);
    const double lost = report.total_norm2 > 0.0
                            ? std::max(0.0, 1.0 - report.kept_norm2 / report.total_norm2)
                            : 0.0;
    return {{"name", selector.name()},
            {"selected", selected_.nnz()},
            {"threshold", report.threshold},
            {"ratio", lost}};
  }

  std::size_t bins_;
  std::vector<std::unique_ptr<Selector>> selectors_;
  std::vector<float> copy_;
  SparseBuffer selected_;
  Verdict model_, parameters_;  // for slot 0; for the others
};

// The vectors that one step selected from, bucket by bucket. They are copies, because the commit
// changes the originals.
struct Snapshot {
  struct Part {
    std::vector<float> u;
    std::vector<Segment> layout;
    Slot slot = 0;
    SparseBuffer selected;
  };
  std::vector<Part> buckets;
  std::size_t k = 0;  // sum over the buckets

  bool finite() const {
    return std::ranges::all_of(buckets, [](const Part& b) {
      return std::ranges::all_of(b.u, [](float v) { return std::isfinite(v); });
    });
  }
};

// Wraps a rule. Selects like the rule, and copies u in the steps to be recorded.
class InspectingSelector final : public Selector {
 public:
  InspectingSelector(std::unique_ptr<Selector> inside, std::int64_t every, Snapshot& snapshot)
      : inside_(std::move(inside)), every_(every), snapshot_(snapshot) {}

  std::string_view name() const noexcept override { return inside_->name(); }

  SelectReport select(const SelectTask& task, SparseBuffer& out) override {
    const SelectReport report = inside_->select(task, out);
    const auto step = static_cast<std::int64_t>(task.id.step) + 1;
    if (step != 1 && step % every_ != 0) return report;
    Snapshot::Part part;
    part.layout = std::vector(task.layout.begin(), task.layout.end());
    part.slot = task.id.slot;
    part.selected.assign(out.view());
    if (!task.residual.empty()) {  // before the commit, this is residual + gradient
      part.u.assign(task.residual.span().begin(), task.residual.span().end());
    } else {
      const float reciprocal = 1.0F / task.grad.scale;
      for (const float g : task.grad.f32()) part.u.push_back(g * reciprocal);
    }
    snapshot_.buckets.push_back(std::move(part));
    snapshot_.k += task.keep.k;
    return report;
  }

  void save(std::ostream& out) const override { inside_->save(out); }
  void load(std::istream& in) override { inside_->load(in); }

 private:
  std::unique_ptr<Selector> inside_;
  std::int64_t every_;
  Snapshot& snapshot_;
};

// Writes one bucket's selection to a file. The encoder chooses the index code.
void write_frame(const std::filesystem::path& folder, std::int64_t step, const Snapshot::Part& b) {
  std::vector<std::byte> frame;
  Codec().encode(b.selected.view(), nullptr, frame);
  const std::string name =
      "selected-" + std::to_string(step) + "-" + std::to_string(b.slot) + ".frame";
  keep_beside("--save-frames", folder / name);
  train::write_file(folder / name, [&](std::ostream& out) {
    out.write(reinterpret_cast<const char*>(frame.data()),
              static_cast<std::streamsize>(frame.size()));
  });
}

nlohmann::json record(const InspectOptions& o, Inspector& inspector, const Snapshot& snapshot,
                      const train::StepRecord& step) {
  std::vector<float> all;
  for (const Snapshot::Part& b : snapshot.buckets) all.insert(all.end(), b.u.begin(), b.u.end());
  if (o.save) {
    const std::filesystem::path path = o.out / ("u-" + std::to_string(step.step) + ".npy");
    keep_beside("--save", path);
    write_npy(path, all);
  }
  for (const Snapshot::Part& b : snapshot.buckets) {
    if (o.save_frames) write_frame(o.out, step.step, b);
  }
  const auto id = static_cast<std::uint64_t>(step.step - 1);
  nlohmann::json parameters = nlohmann::json::array();
  nlohmann::json model = inspector.measure("model", all, snapshot.k, {id, 0});
  Slot slot = 1;
  for (const Snapshot::Part& b : snapshot.buckets) {
    for (const Segment& s : b.layout) {
      parameters.push_back(inspector.measure(s.name, std::span(b.u).subspan(s.offset, s.length),
                                             entries(step.density, s.length), {id, slot++}));
    }
  }
  return {{"step", step.step},
          {"epoch", step.epoch},
          {"density", step.density},
          {"model", std::move(model)},
          {"parameters", std::move(parameters)}};
}

// Called before the run, so that a long run does not fail at its end.
void make_folder(const std::filesystem::path& folder) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  std::string failed = "make";
  if (!error && access(folder.c_str(), W_OK) != 0) {
    failed = "write to";
    error = {errno, std::generic_category()};
  }
  if (!error) return;
  throw InvalidArgument("--out: cannot " + failed + " '" + folder.string() + "': " +
                        error.message() + "; give another folder");
}

std::filesystem::path write_json(const std::filesystem::path& folder, const nlohmann::json& all) {
  const std::filesystem::path path = folder / "inspect.json";
  keep_beside("--out", path);
  train::write_file(path, [&](std::ostream& out) { out << train::json_text(all) << '\n'; });
  return path;
}

// Runs the plot script in the project's Python environment. If it fails, the run still succeeds:
// the JSON is written, and the message shows the command that draws the pictures.
void draw(const std::filesystem::path& json, const InspectOptions& o, std::FILE* people) {
  if (o.pictures == "none") return;
  const std::vector<std::string> command{SKIM_PYTHON,   SKIM_PLOTS, "inspect",
                                         json.string(), "--format", o.pictures};
  std::vector<char*> argv;
  for (const std::string& word : command) argv.push_back(const_cast<char*>(word.c_str()));
  argv.push_back(nullptr);
  std::fflush(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, fileno(people), STDOUT_FILENO);
  pid_t child = 0;
  int status = 0;
  const bool started = posix_spawn(&child, argv[0], &actions, nullptr, argv.data(), environ) == 0;
  posix_spawn_file_actions_destroy(&actions);
  if (started && waitpid(child, &status, 0) == child && WIFEXITED(status) &&
      WEXITSTATUS(status) == 0) {
    return;
  }
  std::string line;
  for (const std::string& word : command) line += " " + word;
  std::fprintf(people,
               "no pictures: they need Python with matplotlib (scripts/setup installs it):%s\n",
               line.c_str());
}

void print_verdict(std::FILE* people, const char* what, const Verdict& v) {
  if (v.of == 0) return;
  std::fprintf(people,
               "%s: |u - TopK(u)|^2/|u|^2 <= (1 - k/d)^2 in %d of %d records; closest %.4f of the "
               "bound\n",
               what, v.held, v.of, v.closest);
}

// The last part, with and without training: writes the file, prints the verdict, draws the
// pictures.
void finish(const InspectOptions& o, const Inspector& inspector, const nlohmann::json& all,
            std::FILE* people) {
  const std::filesystem::path path = write_json(o.out, all);
  std::fprintf(people, "%zu records of u in %s\n", all.at("records").size(), path.c_str());
  if (all.at("records").empty()) {
    std::fprintf(
        people, "nothing was selected: all buckets went dense (--density-warmup, --dense-below)\n");
    return;
  }
  print_verdict(people, "model", inspector.model());
  print_verdict(people, "parameters", inspector.parameters());
  draw(path, o, people);
}

int inspect_files(const InspectOptions& o, const train::TrainOptions& t) {
  make_folder(o.out);
  Inspector inspector(o, train::reducer_options(t).select);
  nlohmann::json all{
      {"source", "npy"}, {"density", t.density.value}, {"records", nlohmann::json::array()}};
  for (std::size_t i = 0; i < o.files.size(); ++i) {
    const std::vector<float> u = read_npy(o.files[i]);
    if (!std::ranges::all_of(u, [](float v) { return std::isfinite(v); })) {
      throw train::DataError("'" + o.files[i] + "': contains NaN or infinity as float32");
    }
    all["records"].push_back(
        {{"step", i},
         {"file", o.files[i]},
         {"density", t.density.value},
         {"model", inspector.measure("model", u, entries(t.density.value, u.size()), {i, 0})},
         {"parameters", nlohmann::json::array()}});
  }
  finish(o, inspector, all, stdout);
  return 0;
}

}  // namespace

int inspect_command(int argc, char** argv) {
  InspectOptions o;
  Snapshot snapshot;
  std::optional<Inspector> inspector;
  nlohmann::json all;

  TrainingCommand command;
  command.name = "inspect";
  command.description =
      "Measures the vectors that top-k selects from, and how much each rule leaves out: while a "
      "model trains, on rank 0, or on saved gradients.";
  command.example =
      "Example: a record every 200 steps of LeNet-5 on 4 ranks, with pictures:\n"
      "  skim inspect --model lenet5 --ranks 4 --epochs 2 --every 200 --out lenet5";
  command.uses = {"--select-threshold", "--select-block", "--select-stages", "--select-seeds"};
  command.declare = [&](CommandLine& line) {
    line.group("Inspection");
    line.plain(
        "--npy", o.files, "FILE...",
        "inspect these one-dimensional arrays instead of training; --density and --out apply");
    line.option("--every", o.every, "N",
                "steps (of local steps: rounds) between records; the first one is also recorded")
        ->check(positive());
    line.option("--out", o.out, "DIR", "folder for inspect.json and the pictures");
    line.option("--bins", o.bins, "N",
                "bins of a histogram, which spans 5 standard deviations to each side")
        ->check(positive());
    line.choice("--pictures", o.pictures, "drawn with matplotlib",
                std::array<std::string_view, 3>{"png", "svg", "none"});
    line.flag("--save", o.save,
              "also write the model's u, which is residual + gradient, to DIR/u-STEP.npy; with "
              "--no-feedback, u is the gradient");
    line.flag("--save-frames", o.save_frames,
              "also write the entries selected from each bucket to DIR/selected-STEP-BUCKET.frame, "
              "for skim bench wire --recorded");
  };
  command.before = [&](const std::vector<Row>& rows) -> std::optional<int> {
    if (rows.size() != 1) throw InvalidArgument("--compare: skim inspect looks at one run");
    const train::TrainOptions& t = rows[0].options;
    if (!o.files.empty() && !t.density.is_constant()) {
      throw InvalidArgument("--density: --npy needs a number, not '" + train::to_text(t.density) +
                            "'");
    }
    if (!o.files.empty()) return inspect_files(o, t);
    if (train::is_dense(t) || (t.density.is_constant() && t.density.value >= 1.0)) {
      throw InvalidArgument("a dense exchange selects nothing: there is nothing to inspect");
    }
    return std::nullopt;
  };
  command.attach = [&](const Row& row, int ranks, train::Observer& observer) {
    make_folder(o.out);
    const train::TrainOptions& t = row.options;
    const SelectOptions select = train::reducer_options(t).select;
    inspector.emplace(o, select);
    all = train::options_json(t);
    all["source"] = "training";
    all["ranks"] = ranks;
    all["records"] = nlohmann::json::array();
    observer.selector = [&, select] {
      return std::make_unique<InspectingSelector>(make_selector(select), o.every, snapshot);
    };
    observer.on_step = [&, before = observer.on_step](const train::StepRecord& r) {
      before(r);
      // There is no record if all buckets went dense or the gradient was not finite.
      if (!snapshot.buckets.empty() && snapshot.finite()) {
        all["records"].push_back(record(o, *inspector, snapshot, r));
      }
      snapshot = {};
    };
  };
  command.after = [&](std::FILE* people) { finish(o, *inspector, all, people); };
  return run_training_command(command, argc, argv);
}

}  // namespace skim::tool
