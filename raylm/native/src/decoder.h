// The decoder of the Llama, Qwen2, Qwen3 and Mistral families: one step of all its layers, computed by a team of
// threads.
//
// The residual stream is float. Inputs of products have the type of the weights.
#pragma once

#include <chrono>
#include <cmath>
#include <vector>

#include "attention.h"
#include "linear.h"
#include "low_rank.h"

namespace raylm {

// The structs below are shared with Python (library.py): keep the order.
struct Layer {
  Linear qkv, output, gate_up, down;
  const float* input_norm;      // [hidden]
  const float* post_norm;       // [hidden]
  const float* query_norm;      // [head_dim], or null
  const float* key_norm;        // [head_dim], or null
  int32_t window;               // tokens that a query attends to, 0 for all
  int32_t unused;
};

struct Model {
  int32_t layers, hidden, inner, max_tokens;
  Heads heads;
  float eps;
  float rope_scaling;
  const float* inv_freq;        // [head_dim / 2]
  const float* last_norm;       // [hidden], or null: other layers follow elsewhere, and the result is the stream
  const void* embedding;        // [vocabulary][hidden] of the weights' type, or null: read from the packed head
  Linear head;
  const Layer* layer;
};

enum Part { kLinear, kAttention, kElementwise, kParts };

// The data between layers, for steps of a number of rows. In small steps each layer has its own places, so that no
// place is written twice and pieces may be computed again. In large steps all layers share one place.
template <class T>
class Activations {
 public:
  static constexpr int kMostRowsApart = 8;

  Activations(const Model& model, bool quantized) : m_(model), widest_(std::max({m_.hidden, m_.inner, width()})) {
    const size_t shared = m_.max_tokens, apart = size_t(kMostRowsApart) * m_.layers;
    const size_t once = std::max(shared, apart), twice = std::max(shared, 2 * apart + kMostRowsApart);
    x_.resize(twice * m_.hidden);
    normed_.resize(twice * m_.hidden);
    qkv_.resize(once * qkv_width());
    queries_.resize(once * width());
    attended_.resize(once * width());
    gated_.resize(once * m_.inner);
    angles_.resize(shared * m_.heads.head_dim);
    if (quantized) quantized_.reserve(std::max(shared, kSites * apart), widest_);
  }

  // Sets the number of rows of the step.
  void use(int rows, Redo redo) { rows_ = rows, apart_ = redo == Redo::kYes ? rows : 0; }

  int width() const { return m_.heads.heads * m_.heads.head_dim; }
  int qkv_width() const { return (m_.heads.heads + 2 * m_.heads.kv_heads) * m_.heads.head_dim; }

  // The residual stream and its norm, at the beginning (2 * layer) and in the middle of a layer.
  float* x(int half) { return &x_[half * apart_ * m_.hidden]; }
  T* normed(int half) { return &normed_[half * apart_ * m_.hidden]; }
  T* qkv(int layer) { return &qkv_[layer * apart_ * qkv_width()]; }
  T* queries(int layer) { return &queries_[layer * apart_ * width()]; }
  T* attended(int layer) { return &attended_[layer * apart_ * width()]; }
  T* gated(int layer) { return &gated_[layer * apart_ * m_.inner]; }
  float* angles(int token) { return &angles_[size_t(token) * m_.heads.head_dim]; }
  Quantized quantized(int number) { return quantized_.number(apart_ ? number : 0, rows_, widest_); }

 private:
  const Model& m_;
  const int widest_;
  int rows_ = 0;
  size_t apart_ = 0;
  std::vector<float> x_, angles_;
  std::vector<T> normed_, qkv_, queries_, attended_, gated_;
  QuantizedSpace quantized_;
};

// Runs steps. One object for each model.
template <class T>
class Decoder {
  typedef typename Lane<T>::Unit Unit;
  static constexpr int P = Lane<T>::kPack;

 public:
  Decoder(Team& team, const Model& model)
      : team_(team), m_(model), space_(team.size(), model.heads), a_(m_, is_quantized(m_)) {}

  // One step. `pools` has one pool for each layer: keys and values of `blocks` blocks. The layers begin with the
  // embeddings of `ids`, or with the residual stream [tokens][hidden] of earlier layers if it is not null. The result
  // [tokens][hidden] are hidden states, or the residual stream (float) if the model has no last norm.
  void step(const Batch& batch, const int64_t* ids, const float* stream, void* const* pools, int64_t blocks,
            void* result, const Adapters& adapters) {
    low_rank_.plan_for(adapters);
    if (low_rank_.any()) gate_up_.resize(std::max(gate_up_.size(), size_t(batch.tokens) * 2 * m_.inner));
    const bool small = batch.tokens <= Activations<T>::kMostRowsApart && !low_rank_.any();
    const Redo redo = small ? Redo::kYes : Redo::kNo;
    a_.use(batch.tokens, redo);
    space_.plan_for(batch, m_.heads, small ? m_.layers : 1);
    const size_t half = size_t(blocks) * m_.heads.kv_heads * m_.heads.head_dim * batch.block_size;
    const auto work = [&](int thread) {
      clock_start(thread);
      start(batch, ids, stream);
      norm(batch.tokens, a_.x(0), m_.layer[0].input_norm, a_.normed(0));
      mark(thread, kElementwise);
      for (int i = 0; i < m_.layers; i++) {
        T* keys = static_cast<T*>(pools[i]);
        walk(batch, i, keys, keys + half, small ? i : 0, thread);
        if (i + 1 < m_.layers)
          norm(batch.tokens, a_.x(2 * i + 2), m_.layer[i + 1].input_norm, a_.normed(2 * i + 2));
        else if (m_.last_norm)
          norm(batch.tokens, a_.x(2 * i + 2), m_.last_norm, static_cast<T*>(result));
        else
          copy(batch.tokens, a_.x(2 * i + 2), static_cast<float*>(result));
        mark(thread, kElementwise);
      }
    };
    team_.run(work, redo);
  }

  // Rows of `hidden` -> float logits [rows][stride].
  void logits(const T* hidden, int rows, float* out, ptrdiff_t stride) {
    const Redo redo = rows <= Activations<T>::kMostRowsApart ? Redo::kYes : Redo::kNo;
    a_.use(rows, redo);
    const auto work = [&](int thread) {
      clock_start(thread);
      linear<Into::kStore>(team_, m_.head, hidden, rows, a_.quantized(0), Target<float>{out, stride});
      mark(thread, kLinear);
    };
    team_.run(work, redo);
  }

  const double* seconds() const { return seconds_; }

 private:
  static bool is_quantized(const Model& model) {
    const auto rounded = [](const Linear& w) { return w.kind == kInt8 || w.kind == kInt4; };
    bool any = rounded(model.head);
    for (int i = 0; i < model.layers; i++) {
      const Layer& layer = model.layer[i];
      any = any || rounded(layer.qkv) || rounded(layer.output) || rounded(layer.gate_up) || rounded(layer.down);
    }
    return any;
  }

  // One layer. Attention stores its partial results at number `partials`.
  void walk(const Batch& batch, int number, T* keys, T* values, int partials, int thread) {
    const Layer& layer = m_.layer[number];
    const int begin = 2 * number, middle = begin + 1, end = begin + 2, site = kSites * number;
    Heads heads = m_.heads;
    heads.window = layer.window;
    apply<Into::kStore>(layer.qkv, site + kQkv, batch.tokens, a_.normed(begin), Target<T>{a_.qkv(number), a_.qkv_width()});
    mark(thread, kLinear);
    rotate_and_write(batch, layer, number, keys, values);
    mark(thread, kElementwise);
    Attention<T>(batch, heads, a_.queries(number), a_.width(), reinterpret_cast<const uint32_t*>(keys),
                 reinterpret_cast<const uint32_t*>(values), a_.attended(number), space_, partials)
        .run(team_, thread);
    mark(thread, kAttention);
    apply<Into::kAdd>(layer.output, site + kOutput, batch.tokens, a_.attended(number),
                      Target<float>{a_.x(middle), m_.hidden, a_.x(begin)});
    mark(thread, kLinear);
    norm(batch.tokens, a_.x(middle), layer.post_norm, a_.normed(middle));
    mark(thread, kElementwise);
    gate_and_up(batch, layer.gate_up, site + kGateUp, a_.normed(middle), a_.gated(number));
    apply<Into::kAdd>(layer.down, site + kDown, batch.tokens, a_.gated(number),
                      Target<float>{a_.x(end), m_.hidden, a_.x(middle)});
    mark(thread, kLinear);
  }

  // A linear layer, and the products that adapters add.
  template <Into INTO, class Out>
  void apply(const Linear& weight, int site, int rows, const T* x, Target<Out> target) {
    if (low_rank_.any()) low_rank_.begin(team_, site, x, weight.depth);
    linear<INTO>(team_, weight, x, rows, a_.quantized(site), target);
    if (low_rank_.any()) low_rank_.finish(team_, site, target);
  }

  // With adapters, the gate is applied after their products are added, in floats. Rows without an adapter do not
  // change.
  void gate_and_up(const Batch& batch, const Linear& weight, int site, const T* x, T* gated) {
    if (!low_rank_.any()) {
      apply<Into::kGate>(weight, site, batch.tokens, x, Target<T>{gated, m_.inner});
      return;
    }
    const Target<float> whole{gate_up_.data(), 2 * m_.inner};
    apply<Into::kStore>(weight, site, batch.tokens, x, whole);
    team_.each(batch.tokens, [&](int token) {
      const float* gate = whole.out + token * whole.stride;
      T* out = gated + ptrdiff_t(token) * m_.inner;
      for (int d = 0; d < m_.inner; d += kLanes)
        store_narrow(out + d, Silu::of(load<f32x16>(gate + d)) * load<f32x16>(gate + m_.inner + d));
    });
  }

  // Token ids, or the stream of earlier layers -> the residual stream; positions -> cosines and sines.
  void start(const Batch& batch, const int64_t* ids, const float* stream) {
    const int half = m_.heads.head_dim / 2;
    team_.each(batch.tokens, [&](int token) {
      const size_t at = size_t(token) * m_.hidden;
      if (stream)
        std::memcpy(a_.x(0) + at, stream + at, m_.hidden * sizeof(float));
      else
        embed(ids[token], a_.x(0) + at);
      float* angle = a_.angles(token);
      for (int d = 0; d < half; d++) {
        const float turn = float(batch.positions[token]) * m_.inv_freq[d];
        angle[d] = std::cos(turn) * m_.rope_scaling;
        angle[half + d] = std::sin(turn) * m_.rope_scaling;
      }
    });
  }

  void embed(int64_t id, float* x) {
    if (m_.embedding) {
      const T* row = static_cast<const T*>(m_.embedding) + id * m_.hidden;
      for (int d = 0; d < m_.hidden; d++) x[d] = widen(row[d]);
      return;
    }
    const uint32_t* group = m_.head.packed + ptrdiff_t(id / kLanes) * m_.head.units * kLanes + id % kLanes;
    for (int u = 0; u < m_.head.units; u++) {
      T values[P];
      std::memcpy(values, group + ptrdiff_t(u) * kLanes, 4);
      for (int i = 0; i < P; i++) x[u * P + i] = widen(values[i]);
    }
  }

  void copy(int rows, const float* from, float* to) {
    team_.each(rows, [&](int row) {
      const size_t at = size_t(row) * m_.hidden;
      std::memcpy(to + at, from + at, m_.hidden * sizeof(float));
    });
  }

  void norm(int rows, const float* from, const float* weight, T* out) {
    const int size = m_.hidden;
    team_.each(rows, [&](int row) {
      const float* x = from + ptrdiff_t(row) * size;
      f32x16 squares[4] = {};
      int d = 0;
      for (; d + 64 <= size; d += 64)
        for (int i = 0; i < 4; i++) {
          const f32x16 v = load<f32x16>(x + d + i * kLanes);
          squares[i] += v * v;
        }
      float total = sum((squares[0] + squares[1]) + (squares[2] + squares[3]));
      for (; d < size; d++) total += x[d] * x[d];
      const float scale = 1.0f / std::sqrt(total / size + m_.eps);
      T* to = out + ptrdiff_t(row) * size;
      for (d = 0; d + kLanes <= size; d += kLanes)
        store_narrow(to + d, load<f32x16>(x + d) * scale * load<f32x16>(weight + d));
      for (; d < size; d++) to[d] = narrow<T>(x[d] * scale * weight[d]);
    });
  }

  // Normalizes and rotates the queries and keys of every head, and writes keys and values to the pool.
  void rotate_and_write(const Batch& batch, const Layer& layer, int number, T* keys, T* values) {
    const int kv_heads = m_.heads.kv_heads, group = m_.heads.heads / kv_heads, dim = m_.heads.head_dim;
    team_.each(batch.tokens * kv_heads, [&](int piece) {
      const int token = piece / kv_heads, head = piece % kv_heads;
      const T* row = a_.qkv(number) + ptrdiff_t(token) * a_.qkv_width();
      T* queries = a_.queries(number) + ptrdiff_t(token) * a_.width();
      const float* angle = a_.angles(token);
      for (int g = 0; g < group; g++)
        turn(row + (head * group + g) * dim, queries + (head * group + g) * dim, layer.query_norm, angle);
      const T* key = row + (m_.heads.heads + head) * dim;
      T turned[kMaxHeadDim];
      turn(key, turned, layer.key_norm, angle);
      write_kv(batch, m_.heads, token, head, turned, key + kv_heads * dim, keys, values);
    });
  }

  void turn(const T* head, T* out, const float* weight, const float* angle) {
    const int dim = m_.heads.head_dim, half = dim / 2;
    float x[kMaxHeadDim];
    f32x16 squares = {};
    for (int d = 0; d < dim; d += kLanes) {
      const f32x16 v = load_wide(head + d);
      squares += v * v;
      store(x + d, v);
    }
    if (weight) {
      const float scale = 1.0f / std::sqrt(sum(squares) / dim + m_.eps);
      for (int d = 0; d < dim; d += kLanes) store(x + d, load<f32x16>(x + d) * scale * load<f32x16>(weight + d));
    }
    for (int d = 0; d < half; d++) {
      const float left = x[d], right = x[half + d];
      x[d] = left * angle[d] - right * angle[half + d];
      x[half + d] = right * angle[d] + left * angle[half + d];
    }
    for (int d = 0; d < dim; d += kLanes) store_narrow(out + d, load<f32x16>(x + d));
  }

  // Measures time by the clock of thread 0.
  void clock_start(int thread) {
    if (thread == 0) last_ = std::chrono::steady_clock::now();
  }

  void mark(int thread, Part part) {
    if (thread != 0) return;
    const auto now = std::chrono::steady_clock::now();
    seconds_[part] += std::chrono::duration<double>(now - last_).count();
    last_ = now;
  }

  static constexpr int kMaxHeadDim = 512;

  Team& team_;
  const Model m_;
  AttentionSpace<T> space_;
  Activations<T> a_;
  LowRankProducts<T> low_rank_;
  std::vector<float> gate_up_;
  std::chrono::steady_clock::time_point last_;
  double seconds_[kParts] = {};
};

}  // namespace raylm
