// The list of options: names, and the way to JSON and back.
#include "train/fields.hpp"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>
#include <string>

#include "message_of.hpp"
#include "skim/error.hpp"
#include "train/options_json.hpp"

namespace skim::train {
namespace {

std::string refusal(const nlohmann::json& j) {
  TrainOptions o;
  return test::message_of([&] { read_options(j, o, "file"); });
}

TEST(fields, names_are_unique) {
  std::set<std::string> names;
  TrainOptions o;
  each_field(o, [&](const char* name, auto&, const FieldInfo& info) {
    EXPECT_TRUE(names.insert(name).second) << name;
    EXPECT_GT(std::string(info.what).size(), 4U) << name;
  });
  EXPECT_TRUE(names.contains("local_clip"));
}

TEST(fields, options_survive_json) {
  TrainOptions o;
  o.automatic = true;
  o.chooser.among = {ExchangeKind::gtopk_tree, ExchangeKind::dense};
  o.chooser.link = Link{.alpha_s = 1e-5, .beta_s_per_byte = 1.0 / 3.0};
  o.feedback.residual_decay = 0.1F;
  o.feedback.factor_masking = false;
  o.exchange.codec.index = IndexCode::bitmap;
  o.adaptive_form = AdaptiveForm::water_filling;
  o.memory = Memory::updates;
  o.density = density_rule("accordion=0.001/0.1");
  o.density_warmup = warm_up("0.25,0.0625");
  o.budget = {1.0 / 3.0};
  o.learning_rate.drop_epochs = {0.1, 2.0};
  o.seed = ~std::uint64_t{0};
  o.data.dir = "some/where";
  TrainOptions back;
  read_options(options_json(o), back, "file");
  EXPECT_EQ(options_json(back), options_json(o));
  EXPECT_EQ(back.feedback.residual_decay, 0.1F);
  EXPECT_EQ(options_json(o)["residual_decay"].dump(), "0.1");
  EXPECT_EQ(back.density, o.density);
  EXPECT_EQ(back.seed, o.seed);

  // What 0 stands for is no value out of range.
  TrainOptions defaults;
  read_options(options_json(defaults), back, "file");
  EXPECT_EQ(options_json(back), options_json(defaults));
  // Files of the first run are not written again.
  o.metrics = "m.jsonl";
  read_options(options_json(o), back, "file");
  EXPECT_TRUE(back.metrics.empty());
}

TEST(fields, whole_numbers_of_json_fit_their_option) {
  TrainOptions o;
  const auto refuses = [&](const char* text) {
    EXPECT_THROW(read_options(nlohmann::json::parse(text), o, "file"), InvalidArgument) << text;
  };
  refuses(R"({"steps": 9223372036854775808})");
  refuses(R"({"threads": 4294967297})");
  refuses(R"({"seed": -1})");
  read_options(nlohmann::json::parse(R"({"steps": 9223372036854775807})"), o, "file");
  EXPECT_EQ(o.steps, std::numeric_limits<std::int64_t>::max());
}

TEST(fields, every_rule_survives_its_text) {
  for (const char* text :
       {"0.001", "adaptive", "capture=0.4", "accordion=0.01/0.1", "descent-per-bit"}) {
    EXPECT_EQ(to_text(density_rule(text)), text);
  }
  for (const char* text : {"none", "dgc", "gaussiank", "gtopk", "geometric:4", "0.25,0.0625"}) {
    EXPECT_EQ(to_text(warm_up(text)), text);
  }
}

TEST(fields, refusals) {
  EXPECT_EQ(refusal({{"batch", 0.5}}), "file: batch: expected a whole number, got 0.5");
  EXPECT_EQ(refusal({{"batch", -1}}), "file: batch: expected a number > 0, got -1");
  EXPECT_EQ(refusal({{"dense_below", -1}}), "file: dense_below: expected a number >= 0, got -1");
  EXPECT_EQ(refusal({{"momentum", 1.5}}), "file: momentum: expected a number in [0, 1), got 1.5");
  for (const char* amount : {"compute", "budget", "target_time"}) {
    EXPECT_EQ(refusal({{amount, -1}}),
              std::string("file: ") + amount + ": expected a number >= 0, got -1");
  }
  EXPECT_EQ(refusal({{"lr_drops", {1, -1}}}), "file: lr_drops: expected a number >= 0, got -1");
  EXPECT_EQ(refusal({{"lr", "fast"}}), "file: lr: not a value that --summary writes: \"fast\"");
  EXPECT_EQ(refusal({{"drop", "all"}}).find("file: drop: no 'all'; there are: survivors"), 0U);
}

}  // namespace
}  // namespace skim::train
