// The trainer's models. They have as many parameters as in the papers that they come from, which a
// test checks.
#include "train/models.hpp"

#include <ATen/CPUGeneratorImpl.h>
#include <torch/nn/modules.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>
#include <vector>

#include "skim/names.hpp"
#include "train/memory.hpp"
#include "train/random.hpp"

namespace skim::train {

Model::Model() : generator_(at::detail::createCPUGenerator()) {}
Model::~Model() = default;

void Model::seed_dropout(std::uint64_t seed) { generator_.set_current_seed(seed); }

torch::Tensor Model::dropout(const torch::Tensor& x, double p) {
  if (!is_training()) return x;
  return x * torch::empty_like(x).bernoulli_(1.0 - p, generator_).div_(1.0 - p);
}

namespace {

namespace nn = torch::nn;
using torch::Tensor;

[[noreturn]] void refuse(const ModelOptions& o, const std::string& why) {
  throw InvalidArgument("model " + o.name + ": " + why);
}

void expect_sides(const ModelOptions& o, std::int64_t least) {
  if (o.height >= least && o.width >= least) return;
  refuse(o, "images must be at least " + std::to_string(least) + "x" + std::to_string(least) +
                " (got " + std::to_string(o.height) + "x" + std::to_string(o.width) + ")");
}

std::int64_t or_default(std::int64_t value, std::int64_t standard) {
  return value == 0 ? standard : value;
}

// Initial parameters.

enum class Init : std::uint8_t {
  classic,  // weights and biases uniform in +-1/sqrt(inputs), as in torch; embeddings in +-1
  he,       // convolutions uniform with variance 2/inputs (He et al. 2015), biases 0
  gpt,      // variance 0.02^2, but less for the outputs of residual branches; biases 0
};

// A weight with two or more dimensions starts with entries uniform in +- this bound.
double weight_bound(Init init, std::string_view name, const Tensor& w, const ModelOptions& o) {
  const auto inputs = static_cast<double>(w.numel() / w.size(0));
  switch (init) {
    case Init::classic:
      return name == "embedding.weight" ? 1.0 : 1.0 / std::sqrt(inputs);
    case Init::he:
      return std::sqrt((w.dim() == 4 ? 6.0 : 1.0) / inputs);
    case Init::gpt: {
      const bool branch_end = name.ends_with("project.weight") || name.ends_with("down.weight");
      const auto branches = static_cast<double>(2 * or_default(o.layers, 4));
      return 0.02 * std::sqrt(3.0) / (branch_end ? std::sqrt(branches) : 1.0);
    }
  }
  return 0.0;
}

// Each parameter has its own stream of random numbers. It does not use torch's distributions,
// because they differ in the last bit between CPUs.
void initialise(Model& model, Init init, const ModelOptions& o) {
  const torch::NoGradGuard no_grad;
  std::uint64_t stream = 0;
  double bias_bound = 0.0;  // of the bias that follows its weight in named_parameters()
  for (const auto& parameter : model.named_parameters()) {
    const std::string& name = parameter.key();
    const Tensor& tensor = parameter.value();
    double bound = bias_bound;
    if (tensor.dim() > 1) {
      bound = weight_bound(init, name, tensor, o);
      bias_bound = init == Init::classic ? bound : 0.0;
    } else if (name.ends_with("weight")) {  // scale of a normalisation layer
      tensor.fill_(1.0);
      bias_bound = 0.0;
      continue;
    }
    Random random{o.seed, 0x6d6f64656cU, stream++};
    const auto half = static_cast<float>(bound);
    float* const data = tensor.data_ptr<float>();
    for (std::int64_t i = 0; i < tensor.numel(); ++i) data[i] = random.uniform(-half, half);
  }
}

// Image models.

nn::Conv2d conv(std::int64_t in, std::int64_t out, std::int64_t kernel, std::int64_t padding,
                std::int64_t stride = 1, bool bias = true) {
  return nn::Conv2d(nn::Conv2dOptions(in, out, kernel).padding(padding).stride(stride).bias(bias));
}

// Fully connected layers with ReLU between them.
class Mlp : public Model {
 public:
  Mlp(const ModelOptions& o, std::vector<std::int64_t> widths) {
    std::int64_t in = o.channels * o.height * o.width;
    widths.push_back(o.classes);
    for (const std::int64_t out : widths) {
      layers_.push_back(
          register_module("fc" + std::to_string(layers_.size() + 1), nn::Linear(in, out)));
      in = out;
    }
  }
  Tensor forward(const Tensor& input) override {
    Tensor x = input.flatten(1);
    for (std::size_t i = 0; i < layers_.size(); ++i) {
      x = layers_[i]->forward(i == 0 ? x : torch::relu(x));
    }
    return x;
  }

 private:
  std::vector<nn::Linear> layers_;
};

class LeNet5 : public Model {
 public:
  explicit LeNet5(const ModelOptions& o) {
    expect_sides(o, 12);
    const std::int64_t features = 16 * ((o.height / 2 - 4) / 2) * ((o.width / 2 - 4) / 2);
    conv1_ = register_module("conv1", conv(o.channels, 6, 5, 2));
    conv2_ = register_module("conv2", conv(6, 16, 5, 0));
    fc1_ = register_module("fc1", nn::Linear(features, 120));
    fc2_ = register_module("fc2", nn::Linear(120, 84));
    fc3_ = register_module("fc3", nn::Linear(84, o.classes));
  }
  Tensor forward(const Tensor& input) override {
    Tensor x = torch::max_pool2d(torch::relu(conv1_->forward(input)), 2);
    x = torch::max_pool2d(torch::relu(conv2_->forward(x)), 2);
    x = torch::relu(fc1_->forward(x.flatten(1)));
    return fc3_->forward(torch::relu(fc2_->forward(x)));
  }

 private:
  nn::Conv2d conv1_{nullptr}, conv2_{nullptr};
  nn::Linear fc1_{nullptr}, fc2_{nullptr}, fc3_{nullptr};
};

// Two 3x3 convolutions, max pooling, dropout.
class Cnn : public Model {
 public:
  explicit Cnn(const ModelOptions& o) {
    expect_sides(o, 6);
    const std::int64_t features = 64 * ((o.height - 4) / 2) * ((o.width - 4) / 2);
    conv1_ = register_module("conv1", conv(o.channels, 32, 3, 0));
    conv2_ = register_module("conv2", conv(32, 64, 3, 0));
    fc1_ = register_module("fc1", nn::Linear(features, 128));
    fc2_ = register_module("fc2", nn::Linear(128, o.classes));
  }
  Tensor forward(const Tensor& input) override {
    Tensor x = torch::relu(conv1_->forward(input));
    x = torch::max_pool2d(torch::relu(conv2_->forward(x)), 2);
    x = torch::relu(fc1_->forward(dropout(x, 0.25).flatten(1)));
    return fc2_->forward(dropout(x, 0.25));
  }

 private:
  nn::Conv2d conv1_{nullptr}, conv2_{nullptr};
  nn::Linear fc1_{nullptr}, fc2_{nullptr};
};

// Two 5x5 convolutions with batch norm.
class CnnBatchNorm : public Model {
 public:
  explicit CnnBatchNorm(const ModelOptions& o) {
    expect_sides(o, 4);
    conv1_ = register_module("conv1", conv(o.channels, 16, 5, 2));
    norm1_ = register_module("norm1", nn::BatchNorm2d(16));
    conv2_ = register_module("conv2", conv(16, 32, 5, 2));
    norm2_ = register_module("norm2", nn::BatchNorm2d(32));
    fc_ = register_module("fc", nn::Linear(32 * (o.height / 4) * (o.width / 4), o.classes));
  }
  Tensor forward(const Tensor& input) override {
    Tensor x = torch::max_pool2d(torch::relu(norm1_->forward(conv1_->forward(input))), 2);
    x = torch::max_pool2d(torch::relu(norm2_->forward(conv2_->forward(x))), 2);
    return fc_->forward(x.flatten(1));
  }

 private:
  nn::Conv2d conv1_{nullptr}, conv2_{nullptr};
  nn::BatchNorm2d norm1_{nullptr}, norm2_{nullptr};
  nn::Linear fc_{nullptr};
};

class ResidualBlock : public nn::Module {
 public:
  ResidualBlock(std::int64_t in, std::int64_t out, std::int64_t stride)
      : stride_(stride), padding_((out - in) / 2) {
    conv1_ = register_module("conv1", conv(in, out, 3, 1, stride, false));
    norm1_ = register_module("norm1", nn::BatchNorm2d(out));
    conv2_ = register_module("conv2", conv(out, out, 3, 1, 1, false));
    norm2_ = register_module("norm2", nn::BatchNorm2d(out));
  }
  Tensor forward(const Tensor& input) {
    const Tensor x = torch::relu(norm1_->forward(conv1_->forward(input)));
    // The shortcut is option A of He et al. 2016, 4.2: it takes every second pixel, sets the new
    // channels to zero, and has no parameters.
    Tensor shortcut = input;
    if (stride_ > 1) {
      shortcut = torch::constant_pad_nd(
          input.slice(2, 0, INT64_MAX, stride_).slice(3, 0, INT64_MAX, stride_),
          {0, 0, 0, 0, padding_, padding_});
    }
    return torch::relu(norm2_->forward(conv2_->forward(x)) + shortcut);
  }

 private:
  std::int64_t stride_, padding_;
  nn::Conv2d conv1_{nullptr}, conv2_{nullptr};
  nn::BatchNorm2d norm1_{nullptr}, norm2_{nullptr};
};

// The version for CIFAR, with three stages of three blocks. It takes images of any size, because it
// ends with a mean over the pixels.
class ResNet20 : public Model {
 public:
  explicit ResNet20(const ModelOptions& o) {
    conv_ = register_module("conv", conv(o.channels, 16, 3, 1, 1, false));
    norm_ = register_module("norm", nn::BatchNorm2d(16));
    std::int64_t in = 16;
    for (const std::int64_t out : {16, 32, 64}) {
      for (int i = 0; i < 3; ++i) {
        blocks_.push_back(
            register_module("block" + std::to_string(blocks_.size() + 1),
                            std::make_shared<ResidualBlock>(in, out, in < out ? 2 : 1)));
        in = out;
      }
    }
    fc_ = register_module("fc", nn::Linear(in, o.classes));
  }
  Tensor forward(const Tensor& input) override {
    Tensor x = torch::relu(norm_->forward(conv_->forward(input)));
    for (const auto& block : blocks_) x = block->forward(x);
    return fc_->forward(x.mean({2, 3}));
  }

 private:
  nn::Conv2d conv_{nullptr};
  nn::BatchNorm2d norm_{nullptr};
  std::vector<std::shared_ptr<ResidualBlock>> blocks_;
  nn::Linear fc_{nullptr};
};

// The version for CIFAR, with batch norm and one fully connected layer. Its five poolings need
// 32x32 pixels, so smaller images are padded with zeros (the mean colour) to this size.
class Vgg16 : public Model {
 public:
  explicit Vgg16(const ModelOptions& o) {
    std::int64_t in = o.channels;
    for (const std::int64_t out : kPlan) {
      if (out == kPool) continue;
      const std::string number = std::to_string(convs_.size() + 1);
      convs_.push_back(register_module("conv" + number, conv(in, out, 3, 1)));
      norms_.push_back(register_module("norm" + number, nn::BatchNorm2d(out)));
      in = out;
    }
    const std::int64_t rows = std::max(o.height, kLeast) / kLeast;
    const std::int64_t columns = std::max(o.width, kLeast) / kLeast;
    fc_ = register_module("fc", nn::Linear(in * rows * columns, o.classes));
  }
  Tensor forward(const Tensor& input) override {
    const std::int64_t down = std::max<std::int64_t>(0, kLeast - input.size(2));
    const std::int64_t right = std::max<std::int64_t>(0, kLeast - input.size(3));
    Tensor x =
        torch::constant_pad_nd(input, {right / 2, right - right / 2, down / 2, down - down / 2});
    std::size_t i = 0;
    for (const std::int64_t out : kPlan) {
      if (out == kPool) {
        x = torch::max_pool2d(x, 2);
      } else {
        x = torch::relu(norms_[i]->forward(convs_[i]->forward(x)));
        ++i;
      }
    }
    return fc_->forward(x.flatten(1));
  }

 private:
  static constexpr std::int64_t kLeast = 32;
  static constexpr std::int64_t kPool = 0;
  // Configuration D of Simonyan and Zisserman 2014: the output channels of each convolution.
  static constexpr std::array<std::int64_t, 18> kPlan = {64,  64,    kPool, 128,   128, kPool,
                                                         256, 256,   256,   kPool, 512, 512,
                                                         512, kPool, 512,   512,   512, kPool};

  std::vector<nn::Conv2d> convs_;
  std::vector<nn::BatchNorm2d> norms_;
  nn::Linear fc_{nullptr};
};

// Text models.

// Predicts characters. Each window starts from a zero state, because windows are shuffled.
class Lstm : public Model {
 public:
  static double parameter_count(const ModelOptions& o) {
    const auto v = static_cast<double>(o.vocabulary);
    const auto e = static_cast<double>(or_default(o.embedding, 64));
    const auto h = static_cast<double>(or_default(o.hidden, 256));
    const auto layers = static_cast<double>(or_default(o.layers, 1));
    return v * e + 4 * h * (e + h + 2) + (layers - 1) * 4 * h * (2 * h + 2) + (h + 1) * v;
  }
  explicit Lstm(const ModelOptions& o) {
    const std::int64_t embedding = or_default(o.embedding, 64);
    const std::int64_t hidden = or_default(o.hidden, 256);
    embedding_ = register_module("embedding", nn::Embedding(o.vocabulary, embedding));
    lstm_ = register_module("lstm", nn::LSTM(nn::LSTMOptions(embedding, hidden)
                                                 .num_layers(or_default(o.layers, 1))
                                                 .batch_first(true)));
    fc_ = register_module("fc", nn::Linear(hidden, o.vocabulary));
  }
  Tensor forward(const Tensor& input) override {
    return fc_->forward(std::get<0>(lstm_->forward(embedding_->forward(input))));
  }

 private:
  nn::Embedding embedding_{nullptr};
  nn::LSTM lstm_{nullptr};
  nn::Linear fc_{nullptr};
};

// Pre-norm: x += attention(norm(x)); x += mlp(norm(x)).
class TransformerBlock : public nn::Module {
 public:
  TransformerBlock(std::int64_t embedding, std::int64_t heads) : heads_(heads) {
    const nn::LayerNormOptions over_embedding({embedding});
    norm1_ = register_module("norm1", nn::LayerNorm(over_embedding));
    attend_ = register_module("attend", nn::Linear(embedding, 3 * embedding));
    project_ = register_module("project", nn::Linear(embedding, embedding));
    norm2_ = register_module("norm2", nn::LayerNorm(over_embedding));
    up_ = register_module("up", nn::Linear(embedding, 4 * embedding));
    down_ = register_module("down", nn::Linear(4 * embedding, embedding));
  }
  Tensor forward(const Tensor& input) {
    const std::int64_t n = input.size(0), length = input.size(1), embedding = input.size(2);
    // [3, N, heads, T, embedding / heads]: queries, keys, values
    const Tensor qkv = attend_->forward(norm1_->forward(input))
                           .view({n, length, 3, heads_, embedding / heads_})
                           .permute({2, 0, 3, 1, 4});
    const Tensor mixed = torch::scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], {}, 0.0, true);
    const Tensor x =
        input + project_->forward(mixed.transpose(1, 2).reshape({n, length, embedding}));
    return x + down_->forward(torch::gelu(up_->forward(norm2_->forward(x))));
  }

 private:
  std::int64_t heads_;
  nn::LayerNorm norm1_{nullptr}, norm2_{nullptr};
  nn::Linear attend_{nullptr}, project_{nullptr}, up_{nullptr}, down_{nullptr};
};

class Gpt : public Model {
 public:
  static double parameter_count(const ModelOptions& o) {
    const auto v = static_cast<double>(o.vocabulary);
    const auto e = static_cast<double>(or_default(o.embedding, 128));
    const auto context = static_cast<double>(or_default(o.context, 64));
    const auto layers = static_cast<double>(or_default(o.layers, 4));
    return (2 * v + context + 2) * e + layers * e * (12 * e + 13);
  }
  explicit Gpt(const ModelOptions& o) : context_(or_default(o.context, 64)) {
    const std::int64_t embedding = or_default(o.embedding, 128);
    const std::int64_t heads = or_default(o.heads, 4);
    if (embedding % heads != 0) {
      refuse(o, "embedding must be a multiple of heads (embedding " + std::to_string(embedding) +
                    ", heads " + std::to_string(heads) + ")");
    }
    characters_ = register_module("characters", nn::Embedding(o.vocabulary, embedding));
    positions_ = register_module("positions", nn::Embedding(context_, embedding));
    for (std::int64_t i = 0; i < or_default(o.layers, 4); ++i) {
      blocks_.push_back(register_module("block" + std::to_string(i + 1),
                                        std::make_shared<TransformerBlock>(embedding, heads)));
    }
    norm_ = register_module("norm", nn::LayerNorm(nn::LayerNormOptions({embedding})));
    fc_ = register_module("fc", nn::Linear(nn::LinearOptions(embedding, o.vocabulary).bias(false)));
  }
  Tensor forward(const Tensor& input) override {
    const std::int64_t length = input.size(1);
    if (length > context_) {
      throw InvalidArgument("model gpt: input must be at most as long as the context (input " +
                            std::to_string(length) + ", context " + std::to_string(context_) + ")");
    }
    Tensor x = characters_->forward(input) + positions_->weight.slice(0, 0, length);
    for (const auto& block : blocks_) x = block->forward(x);
    return fc_->forward(norm_->forward(x));
  }

 private:
  std::int64_t context_;
  nn::Embedding characters_{nullptr}, positions_{nullptr};
  std::vector<std::shared_ptr<TransformerBlock>> blocks_;
  nn::LayerNorm norm_{nullptr};
  nn::Linear fc_{nullptr};
};

// The list of models.

template <class M>
std::shared_ptr<Model> make(const ModelOptions& o) {
  return std::make_shared<M>(o);
}

template <std::int64_t... widths>
std::shared_ptr<Model> make_mlp(const ModelOptions& o) {
  return std::make_shared<Mlp>(o, std::vector<std::int64_t>{widths...});
}

struct Entry {
  std::string_view name;
  Init init;
  std::shared_ptr<Model> (*make)(const ModelOptions&);
  double (*parameter_count)(const ModelOptions&) = nullptr;  // of a model whose sizes are options
};

constexpr std::array kModels = {
    Entry{"linear", Init::classic, make_mlp<>},
    Entry{"mlp-64", Init::classic, make_mlp<64>},
    Entry{"mlp", Init::classic, make_mlp<200, 200>},
    Entry{"mlp-256", Init::classic, make_mlp<256, 128, 64>},
    Entry{"lenet5", Init::classic, make<LeNet5>},
    Entry{"cnn", Init::classic, make<Cnn>},
    Entry{"cnn-bn", Init::classic, make<CnnBatchNorm>},
    Entry{"resnet20", Init::he, make<ResNet20>},
    Entry{"vgg16", Init::he, make<Vgg16>},
    Entry{"lstm", Init::classic, make<Lstm>, Lstm::parameter_count},
    Entry{"gpt", Init::gpt, make<Gpt>, Gpt::parameter_count},
};
static_assert(std::ranges::equal(kModels, kModelKinds, {}, &Entry::name, &ModelKind::name),
              "kModelKinds of model_options.hpp has the same models in the same order");

}  // namespace

std::shared_ptr<Model> make_model(const ModelOptions& options) {
  const Entry& entry = kModels[index_of_name(model_names(), options.name, "model")];
  const auto expect = [&](std::string_view what, std::int64_t value, std::int64_t least) {
    if (value >= least) return;
    refuse(options, std::string(what) + " must be at least " + std::to_string(least) + " (got " +
                        std::to_string(value) + ")");
  };
  if (input_kind(options.name) == InputKind::image) {
    expect("channels", options.channels, 1);
    expect("height", options.height, 1);
    expect("width", options.width, 1);
    expect("classes", options.classes, 1);
  } else {
    expect("vocabulary", options.vocabulary, 1);
    expect("embedding", options.embedding, 0);
    expect("layers", options.layers, 0);
    expect("hidden", options.hidden, 0);
    expect("heads", options.heads, 0);
    expect("context", options.context, 0);
  }
  if (entry.parameter_count != nullptr) {
    expect_memory(2 * sizeof(float) * entry.parameter_count(options), "model " + options.name,
                  "take a smaller model");
  }
  std::shared_ptr<Model> model = entry.make(options);
  initialise(*model, entry.init, options);
  model->seed_dropout(options.seed);
  return model;
}

bool takes_weight_decay(const torch::Tensor& parameter) { return parameter.dim() > 1; }

torch::Tensor cross_entropy(const torch::Tensor& logits, const torch::Tensor& target) {
  return torch::cross_entropy_loss(logits.reshape({-1, logits.size(-1)}), target.reshape({-1}));
}

std::int64_t count_correct(const torch::Tensor& logits, const torch::Tensor& target) {
  return logits.argmax(-1).eq(target).sum().item<std::int64_t>();
}

}  // namespace skim::train
