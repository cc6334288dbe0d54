// The compact decoder of the Llama, Qwen2, Qwen3 and Mistral families: one step of all its layers, walked by the team.
//
// The residual stream is float; what enters a product has the type of the weights.
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
  int32_t window;               // tokens that a query sees, 0 for all
  int32_t unused;
};

struct Model {
  int32_t layers, hidden, inner, max_tokens;
  Heads heads;
  float eps;
  float rope_scaling;
  const float* inv_freq;        // [head_dim / 2]
  const float* last_norm;       // [hidden]
  const void* embedding;        // [vocabulary][hidden] of the weights' type, or null: read from the packed head
  Linear head;
  const Layer* layer;
};

enum Part { kLinear, kAttention, kElementwise, kParts };

// Scratch of the largest step, and the walk. One object a model.
template <class T>
class Decoder {
  typedef typename Lane<T>::Unit Unit;
  static constexpr int P = Lane<T>::kPack;

 public:
  Decoder(Team& team, const Model& model) : team_(team), m_(model), space_(team.size(), model.heads) {
    const size_t tokens = size_t(m_.max_tokens);
    x_.resize(tokens * m_.hidden);
    normed_.resize(tokens * m_.hidden);
    qkv_.resize(tokens * qkv_width());
    attended_.resize(tokens * m_.heads.heads * m_.heads.head_dim);
    gated_.resize(tokens * m_.inner);
    angles_.resize(tokens * m_.heads.head_dim);
    const size_t widest = std::max({m_.hidden, m_.inner, m_.heads.heads * m_.heads.head_dim});
    quantized_.reserve(tokens, widest);
  }

  // One step. `pools` has one pool a layer: keys and values of `blocks` blocks; `hidden` [tokens][hidden] is the result.
  void step(const Batch& batch, const int64_t* ids, void* const* pools, int64_t blocks, T* hidden,
            const Adapters& adapters) {
    space_.plan_for(batch, m_.heads);
    low_rank_.plan_for(adapters);
    if (low_rank_.any()) gate_up_.resize(std::max(gate_up_.size(), size_t(batch.tokens) * 2 * m_.inner));
    const size_t half = size_t(blocks) * m_.heads.kv_heads * m_.heads.head_dim * batch.block_size;
    team_.run([&](int thread) {
      clock_start(thread);
      start(batch, ids);
      norm(batch.tokens, m_.layer[0].input_norm, normed_.data());
      mark(thread, kElementwise);
      for (int i = 0; i < m_.layers; i++) {
        T* keys = static_cast<T*>(pools[i]);
        walk(batch, i, keys, keys + half, thread);
        const bool last = i + 1 == m_.layers;
        norm(batch.tokens, last ? m_.last_norm : m_.layer[i + 1].input_norm, last ? hidden : normed_.data());
        mark(thread, kElementwise);
      }
    });
  }

  // Rows of `hidden` -> float logits [rows][stride].
  void logits(const T* hidden, int rows, float* out, ptrdiff_t stride) {
    team_.run([&](int thread) {
      clock_start(thread);
      linear<Into::kStore>(team_, m_.head, hidden, rows, quantized_, Target<float>{out, stride});
      mark(thread, kLinear);
    });
  }

  const double* seconds() const { return seconds_; }

 private:
  int qkv_width() const { return (m_.heads.heads + 2 * m_.heads.kv_heads) * m_.heads.head_dim; }

  void walk(const Batch& batch, int number, T* keys, T* values, int thread) {
    const Layer& layer = m_.layer[number];
    Heads heads = m_.heads;
    heads.window = layer.window;
    low_rank_.begin(team_, layer.qkv, kSites * number + kQkv, normed_.data(), m_.hidden);
    linear<Into::kStore>(team_, layer.qkv, normed_.data(), batch.tokens, quantized_, Target<T>{qkv_.data(), qkv_width()});
    low_rank_.finish(team_, kSites * number + kQkv, Target<T>{qkv_.data(), qkv_width()});
    mark(thread, kLinear);
    rotate_and_write(batch, layer, keys, values);
    mark(thread, kElementwise);
    Attention<T>(batch, heads, qkv_.data(), qkv_width(), reinterpret_cast<const uint32_t*>(keys),
                 reinterpret_cast<const uint32_t*>(values), attended_.data(), space_)
        .run(team_, thread);
    mark(thread, kAttention);
    low_rank_.begin(team_, layer.output, kSites * number + kOutput, attended_.data(), m_.heads.heads * m_.heads.head_dim);
    linear<Into::kAdd>(team_, layer.output, attended_.data(), batch.tokens, quantized_, Target<float>{x_.data(), m_.hidden});
    low_rank_.finish(team_, kSites * number + kOutput, Target<float>{x_.data(), m_.hidden});
    mark(thread, kLinear);
    norm(batch.tokens, layer.post_norm, normed_.data());
    mark(thread, kElementwise);
    gate_and_up(batch, layer.gate_up, number);
    low_rank_.begin(team_, layer.down, kSites * number + kDown, gated_.data(), m_.inner);
    linear<Into::kAdd>(team_, layer.down, gated_.data(), batch.tokens, quantized_, Target<float>{x_.data(), m_.hidden});
    low_rank_.finish(team_, kSites * number + kDown, Target<float>{x_.data(), m_.hidden});
    mark(thread, kLinear);
  }

  // With adapters the gate waits for what they add; in floats, so that nothing changes for the rows without one.
  void gate_and_up(const Batch& batch, const Linear& weight, int number) {
    if (!low_rank_.any()) {
      linear<Into::kGate>(team_, weight, normed_.data(), batch.tokens, quantized_, Target<T>{gated_.data(), m_.inner});
      return;
    }
    const Target<float> whole{gate_up_.data(), 2 * m_.inner};
    low_rank_.begin(team_, weight, kSites * number + kGateUp, normed_.data(), m_.hidden);
    linear<Into::kStore>(team_, weight, normed_.data(), batch.tokens, quantized_, whole);
    low_rank_.finish(team_, kSites * number + kGateUp, whole);
    team_.each(batch.tokens, [&](int token) {
      const float* gate = whole.out + token * whole.stride;
      T* out = &gated_[size_t(token) * m_.inner];
      for (int d = 0; d < m_.inner; d += kLanes)
        store_narrow(out + d, Silu::of(load<f32x16>(gate + d)) * load<f32x16>(gate + m_.inner + d));
    });
  }

  // Token ids -> the residual stream; positions -> cosines and sines.
  void start(const Batch& batch, const int64_t* ids) {
    const int half = m_.heads.head_dim / 2;
    team_.each(batch.tokens, [&](int token) {
      embed(ids[token], &x_[size_t(token) * m_.hidden]);
      float* angle = &angles_[size_t(token) * m_.heads.head_dim];
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

  void norm(int rows, const float* weight, T* out) {
    const int size = m_.hidden;
    team_.each(rows, [&](int row) {
      const float* x = &x_[size_t(row) * size];
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

  // Norm and rotate the queries (in place) and the keys of every head; write keys and values to the pool.
  void rotate_and_write(const Batch& batch, const Layer& layer, T* keys, T* values) {
    const int kv_heads = m_.heads.kv_heads, group = m_.heads.heads / kv_heads, dim = m_.heads.head_dim;
    team_.each(batch.tokens * kv_heads, [&](int piece) {
      const int token = piece / kv_heads, head = piece % kv_heads;
      T* row = &qkv_[size_t(token) * qkv_width()];
      const float* angle = &angles_[size_t(token) * dim];
      for (int g = 0; g < group; g++) turn(row + (head * group + g) * dim, layer.query_norm, angle);
      T* key = row + (m_.heads.heads + head) * dim;
      turn(key, layer.key_norm, angle);
      write_kv(batch, m_.heads, token, head, key, key + kv_heads * dim, keys, values);
    });
  }

  void turn(T* head, const float* weight, const float* angle) {
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
    for (int d = 0; d < dim; d += kLanes) store_narrow(head + d, load<f32x16>(x + d));
  }

  // Where the time goes, by the clock of thread 0.
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
  std::vector<float> x_, angles_, gate_up_;
  std::vector<T> normed_, qkv_, attended_, gated_;
  Quantized quantized_;
  LowRankProducts<T> low_rank_;
  std::chrono::steady_clock::time_point last_;
  double seconds_[kParts] = {};
};

}  // namespace raylm
