// Attention over a paged pool, for any mix of prompts, chunks and single tokens, grouped heads, windows and soft caps.
//
// The softmax is computed online over chunks of 128 keys (Milakov and Gimelshein 2018; Dao et al. 2022), separately for
// each stretch of 512 keys. The results of the stretches are then added in order. Chunks and stretches begin at
// multiples of their length from the beginning of the sequence. So a row's result depends only on its own keys: not on
// other rows, on the cut of a prompt into steps, or on the threads. The pool has a layout in which both products are
// `multiply` of vector.h, without a horizontal sum. With P values in a 32-bit unit:
//     keys   [blocks][kv heads][head_dim / P][block][P]     16 keys of one unit side by side
//     values [blocks][kv heads][block / P][head_dim][P]     16 dimensions of one unit of keys side by side
// Slots that no token of the sequence was written to are never multiplied. They may hold any value, also NaN.
#pragma once

#include <algorithm>
#include <cmath>
#include <memory>
#include <type_traits>
#include <vector>

#include "team.h"
#include "vector.h"

namespace raylm {

constexpr int kChunk = 128;    // keys of one round of the online softmax
constexpr int kGroups = kChunk / kLanes;
constexpr int kTileRows = 48;  // maximum query rows that read the keys together
constexpr int kStretch = 512;  // keys that are summed separately, a multiple of kChunk
constexpr float kNever = -1e30f;
constexpr int32_t kLaneNumbers[kLanes] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// Shared with Python (library.py): keep the order. The sequences of one step, sequences with one token first.
struct Batch {
  int32_t tokens;
  int32_t seqs;
  int32_t table_width;
  int32_t block_size;
  const int64_t* positions;     // [tokens]
  const int64_t* slots;         // [tokens]
  const int32_t* block_tables;  // [seqs][table_width]
  const int32_t* seq_lens;      // [seqs]
  const int32_t* starts;        // [seqs + 1]
};

// Shared with Python (library.py): keep the order. 0 disables `window` and `softcap`.
struct Heads {
  int32_t heads;
  int32_t kv_heads;
  int32_t head_dim;
  int32_t window;
  float scale;
  float softcap;
};

// Query tokens [token, token + tokens) of a sequence for one kv head, over one of `parts` parts of its stretches. The
// results of stretches are stored from `slot` on, unless it is negative.
struct Item {
  int seq, head, token, tokens, part, parts, slot;
};

// The work of one step, the same for all layers. If there are few long decodes, they are split along their keys.
class Plan {
 public:
  void make(const Batch& batch, const Heads& heads, int threads) {
    items_.clear();
    int singles = 0;
    while (singles < batch.seqs && batch.starts[singles + 1] - batch.starts[singles] == 1) singles++;
    lay_tiles(batch, heads, singles);
    lay_singles(batch, heads, singles, threads);
  }

  const std::vector<Item>& items() const { return items_; }
  const std::vector<Item>& split() const { return split_; }
  int slots() const { return slots_; }

 private:
  void lay_tiles(const Batch& batch, const Heads& heads, int singles) {
    const int most = std::max(1, kTileRows / (heads.heads / heads.kv_heads));
    for (int seq = singles; seq < batch.seqs; seq++) {
      const int begin = batch.starts[seq], end = batch.starts[seq + 1];
      // From the end: tiles with the most keys first, so that the last tiles are short.
      for (int last = end; last > begin; last -= most)
        for (int head = 0; head < heads.kv_heads; head++) {
          const int first = std::max(begin, last - most);
          items_.push_back({seq, head, first, last - first, 0, 1, -1});
        }
    }
  }

  void lay_singles(const Batch& batch, const Heads& heads, int singles, int threads) {
    split_.clear();
    slots_ = 0;
    const int wanted = 4 * threads, total = int(items_.size()) + singles * heads.kv_heads;
    // All heads of a sequence in order, because they are neighbours in its blocks.
    for (int seq = 0; seq < singles; seq++)
      for (int head = 0; head < heads.kv_heads; head++) {
        const int stretches = (batch.seq_lens[seq] + kStretch - 1) / kStretch;
        const int parts = total < wanted && total % threads ? std::min(wanted / total + 1, stretches) : 1;
        const int slot = parts > 1 ? slots_ : -1;
        if (parts > 1) {
          split_.push_back({seq, head, batch.starts[seq], 1, 0, 1, slot});
          slots_ += stretches;
        }
        for (int part = 0; part < parts; part++)
          items_.push_back({seq, head, batch.starts[seq], 1, part, parts, slot});
      }
  }

  std::vector<Item> items_, split_;
  int slots_ = 0;
};

// Memory of one thread for one item, and the results of split items. Grows to the largest size needed.
struct Partial {
  std::vector<float> sums;   // [slots][group][head_dim]
  std::vector<float> norms;  // [slots][group][2]: highest score, sum of weights
  void reserve(int slots, int group, int head_dim) {
    if (sums.size() < size_t(slots) * group * head_dim) sums.resize(size_t(slots) * group * head_dim);
    if (norms.size() < size_t(slots) * group * 2) norms.resize(size_t(slots) * group * 2);
  }
};

// Memory of one thread.
template <class T>
struct AttentionScratch {
  AttentionScratch(int rows, int head_dim)
      : q(size_t(rows) * head_dim), p(size_t(rows) * kChunk), tail(head_dim), s(size_t(rows) * kChunk),
        o(size_t(rows) * head_dim), whole_o(o.size()), top(rows), total(rows), fade(rows), whole_top(rows),
        whole_total(rows), position(rows) {}
  std::vector<T> q, p;
  std::vector<uint32_t> tail;
  std::vector<float> s, o, whole_o, top, total, fade, whole_top, whole_total;  // `whole`: sum over the stretches so far
  std::vector<int> position;
};

// The factor for a result whose highest score was `top`, if the highest score is now `now`. If no key was seen, exp
// would underflow slowly.
inline float fade_of(float top, float now) { return top == now ? 1.0f : top == kNever ? 0.0f : std::exp(top - now); }

// Adds the result of the next stretch to a row's weighted values `o` [head_dim], highest score and sum of weights.
// Never inlined, so that every call rounds equally.
__attribute__((noinline)) inline void add_stretch(float* o, float& top, float& total, const float* stretch_o,
                                                  float stretch_top, float stretch_total, int head_dim) {
  const float now = std::max(top, stretch_top), before = fade_of(top, now), behind = fade_of(stretch_top, now);
  for (int d = 0; d < head_dim; d += kLanes)
    store(o + d, load<f32x16>(o + d) * before + load<f32x16>(stretch_o + d) * behind);
  total = total * before + stretch_total * behind;
  top = now;
}

// The memory of a team for any step of these heads.
template <class T>
struct AttentionSpace {
  AttentionSpace(int threads, const Heads& heads)
      : scratch(threads, AttentionScratch<T>(std::max(kTileRows, heads.heads / heads.kv_heads), heads.head_dim)) {}
  // `layers` have separate places for the partial results of their attention.
  void plan_for(const Batch& batch, const Heads& heads, int layers = 1) {
    plan.make(batch, heads, int(scratch.size()));
    partial.reserve(plan.slots() * layers, heads.heads / heads.kv_heads, heads.head_dim);
  }
  Plan plan;
  Partial partial;
  std::vector<AttentionScratch<T>> scratch;
};

template <class T>
class Attention {
  typedef typename Lane<T>::Unit Unit;
  static constexpr int P = Lane<T>::kPack;
  static constexpr int kGroupUnits = kLanes / P;

 public:
  // `q` [tokens][q_stride] and `out` [tokens][heads * head_dim] of T. `pool` has keys, then values, of `blocks` blocks.
  // `layer` is one of the layers that the memory was planned for.
  Attention(const Batch& batch, const Heads& heads, const T* q, ptrdiff_t q_stride, const uint32_t* keys,
            const uint32_t* values, T* out, AttentionSpace<T>& space, int layer = 0)
      : b_(batch), h_(heads), group_(heads.heads / heads.kv_heads), units_(heads.head_dim / P), q_(q),
        q_stride_(q_stride), keys_(keys), values_(values), out_(out), space_(space), first_slot_(size_t(layer) * space.plan.slots()) {}

  // Runs its own phases. Every thread of the team calls it.
  void run(Team& team, int thread) {
    const auto& items = space_.plan.items();
    const int count = int(items.size());
    team.share(count, [&](int i, int next) {
      attend(items[i], next < count ? &items[next] : nullptr, space_.scratch[thread]);
    });
    const auto& split = space_.plan.split();
    team.share(int(split.size()), [&](int i, int) { combine(split[i], space_.scratch[thread]); });
  }

 private:
  typedef AttentionScratch<T> Scratch;

  struct Span {
    int begin, end, number;  // `number`: index of the first stretch among those of the row
  };

  // The keys that an item reads, from the beginning of a chunk.
  Span span_of(const Item& item) const {
    const int first = int(b_.positions[item.token]), end = first + item.tokens;
    const int begin = h_.window > 0 ? std::max(0, first - h_.window + 1) / kChunk * kChunk : 0;
    if (item.parts == 1) return {begin, end, 0};
    const int from = begin / kStretch, stretches = (end + kStretch - 1) / kStretch - from;
    const int part = stretches * item.part / item.parts, next = stretches * (item.part + 1) / item.parts;
    return {std::max(begin, (from + part) * kStretch), std::min(end, (from + next) * kStretch), part};
  }

  void attend(const Item& item, const Item* next, Scratch& s) {
    const int rows = item.tokens * group_, first = int(b_.positions[item.token]);
    auto [begin, end, number] = span_of(item);
    gather(item, s);
    clear(s.o, s.top, s.total, rows);
    clear(s.whole_o, s.whole_top, s.whole_total, rows);
    for (int at = begin; at < end; at += kChunk) {
      const int keys = std::min(kChunk, end - at);
      score(item, s, rows, at, keys);
      const bool whole = keys == kChunk && at + kChunk <= first + 1 &&
                         (h_.window <= 0 || at > first + item.tokens - 1 - h_.window);
      const int groups = (keys + kLanes - 1) / kLanes;
      int r = 0;
      for (; whole && r + 2 <= rows; r += 2) weigh<false, 2>(s, r, at, kGroups);
      for (; r < rows; r++) whole ? weigh<false, 1>(s, r, at, kGroups) : weigh<true, 1>(s, r, at, groups);
      accumulate(item, s, rows, at, keys, what_follows(item, next, at + kChunk, end));
      const int behind = at + kChunk;
      if (behind % kStretch && behind < end) continue;
      item.slot < 0 ? add(s, rows) : leave(item.slot + number++, s, rows);
      if (behind < end) clear(s.o, s.top, s.total, rows);
    }
    if (item.slot < 0) finish(item, s, rows);
  }

  void clear(std::vector<float>& o, std::vector<float>& top, std::vector<float>& total, int rows) const {
    std::fill_n(top.begin(), rows, kNever);
    std::fill_n(total.begin(), rows, 0.0f);
    std::fill_n(o.begin(), size_t(rows) * h_.head_dim, 0.0f);
  }

  void gather(const Item& item, Scratch& s) {
    for (int t = 0, r = 0; t < item.tokens; t++)
      for (int g = 0; g < group_; g++, r++) {
        const T* from = q_ + (item.token + t) * q_stride_ + (item.head * group_ + g) * h_.head_dim;
        std::copy_n(from, h_.head_dim, &s.q[size_t(r) * h_.head_dim]);
        s.position[r] = int(b_.positions[item.token + t]);
      }
  }

  // The address of the 16 keys from `key` on: their block for this head, and the offset in it.
  size_t block_of(const Item& item, int key) const {
    const int32_t block = b_.block_tables[ptrdiff_t(item.seq) * b_.table_width + key / b_.block_size];
    return size_t(block) * h_.kv_heads + item.head;
  }

  // The address of 16 keys from `key` on. Units are `block_size` words apart.
  const uint32_t* keys_of(const Item& item, int key) const {
    return keys_ + block_of(item, key) * units_ * b_.block_size + key % b_.block_size;
  }

  ptrdiff_t line_stride() const { return ptrdiff_t(b_.block_size) * 4; }

  // The keys that a thread reads after a chunk of a single token, by groups of 16; null if there are none.
  struct Following {
    const char* groups[kGroups] = {};
  };

  // The keys from `behind` on, or the first keys of the next item.
  Following what_follows(const Item& item, const Item* next, int behind, int end) const {
    Following found;
    if (item.tokens > 1) return found;
    const Item* from = &item;
    if (behind >= end) {
      if (!next) return found;
      const auto [first, last, number] = span_of(*next);
      from = next, behind = first, end = last;
    }
    for (int g = 0; g < kGroups && behind + g * kLanes < end; g++)
      found.groups[g] = reinterpret_cast<const char*>(keys_of(*from, behind + g * kLanes));
    return found;
  }

  // The address of the values of the 16 keys from `key` on.
  const uint32_t* values_of(const Item& item, int key) const {
    return values_ + (block_of(item, key) * (b_.block_size / P) + key % b_.block_size / P) * h_.head_dim;
  }

  // A single token does little work for each key and value. So memory is prefetched at the pace of the products: here
  // the values of the chunk, and in `accumulate` the next keys.
  void score(const Item& item, Scratch& s, int rows, int at, int keys) {
    const Unit* q = reinterpret_cast<const Unit*>(s.q.data());
    for (int from = 0; from < keys; from += 4 * kLanes) {
      const uint32_t* streams[4];
      const char* values[4];
      for (int g = 0; g < 4; g++) {
        const int offset = from + g * kLanes, key = at + (offset < keys ? offset : from);  // beyond the end: masked below
        streams[g] = keys_of(item, key);
        values[g] = reinterpret_cast<const char*>(values_of(item, key));
      }
      bool asks = item.tokens == 1;
      in_tiles(rows, [&]<int R>(std::integral_constant<int, R>, int r) {
        asks ? score_rows<R, 4>(s, q, r, from, streams, values) : score_rows<R, 0>(s, q, r, from, streams, values);
        asks = false;
      });
    }
  }

  // Calls `tile(R, r)` for rows r .. r + R, until all rows are done.
  template <class Tile>
  static RAYLM_INLINE void in_tiles(int rows, const Tile& tile) {
    int r = 0;
    for (; r + 6 <= rows; r += 6) tile(std::integral_constant<int, 6>(), r);
    for (; r + 3 <= rows; r += 3) tile(std::integral_constant<int, 3>(), r);
    for (; r + 2 <= rows; r += 2) tile(std::integral_constant<int, 2>(), r);
    for (; r < rows; r++) tile(std::integral_constant<int, 1>(), r);
  }

  template <int R, int AHEAD>
  RAYLM_INLINE void score_rows(Scratch& s, const Unit* q, int r, int from, const uint32_t* const (&streams)[4],
                               const char* const (&values)[4]) {
    f32x16 sums[R][4] = {};
    multiply<T, R, 4, 0, AHEAD>(sums, q + ptrdiff_t(r) * units_, units_, streams, b_.block_size, units_, values);
    for (int i = 0; i < R; i++)
      for (int g = 0; g < 4; g++) store(&s.s[size_t(r + i) * kChunk + from + g * kLanes], sums[i][g] * h_.scale);
  }

  // Converts scores of R rows to weights relative to the highest score so far, and computes the factor for earlier
  // results. A row waits for its highest score and then for its sum; a second row fills this time.
  template <bool MASKED, int R>
  void weigh(Scratch& s, int r, int at, int groups) {
    if (!MASKED) groups = kGroups;
    f32x16 score[R][kGroups], top[R], total[R];
    i32x16 seen[R][kGroups];
    float now[R];
#pragma GCC unroll 2
    for (int i = 0; i < R; i++) {
      top[i] = splat(kNever);
      const int last = s.position[r + i] + 1, low = h_.window > 0 ? last - h_.window : 0;
      for (int g = 0; g < groups; g++) {
        score[i][g] = load<f32x16>(&s.s[size_t(r + i) * kChunk + g * kLanes]);
        if (h_.softcap > 0) score[i][g] = capped(score[i][g]);
        if (MASKED) {
          const i32x16 key = load<i32x16>(kLaneNumbers) + (at + g * kLanes);
          seen[i][g] = (key < last) & (key >= low);
          score[i][g] = select(seen[i][g], score[i][g], splat(kNever));
        }
        top[i] = max(top[i], score[i][g]);
      }
    }
#pragma GCC unroll 2
    for (int i = 0; i < R; i++) {
      now[i] = std::max(s.top[r + i], highest(top[i]));
      total[i] = f32x16{};
    }
    for (int g = 0; g < groups; g++)
#pragma GCC unroll 2
      for (int i = 0; i < R; i++) {
        f32x16 weight = exp(score[i][g] - now[i]);
        if (MASKED) weight = bits<f32x16>(bits<i32x16>(weight) & seen[i][g]);
        total[i] += weight;
        store_narrow(&s.p[size_t(r + i) * kChunk + g * kLanes], weight);
      }
#pragma GCC unroll 2
    for (int i = 0; i < R; i++) {
      s.fade[r + i] = fade_of(s.top[r + i], now[i]);
      s.total[r + i] = s.total[r + i] * s.fade[r + i] + sum(total[i]);
      s.top[r + i] = now[i];
    }
  }

  f32x16 capped(f32x16 score) const {  // softcap * tanh(score / softcap)
    const f32x16 x = max(splat(-20.0f), score / h_.softcap);
    return h_.softcap * (1.0f - 2.0f / (exp(2.0f * select(x < 20.0f, x, splat(20.0f))) + 1.0f));
  }

  void accumulate(const Item& item, Scratch& s, int rows, int at, int keys, const Following& following) {
    const uint32_t* groups[kGroups];
    for (int g = 0; g * kLanes < keys; g++) groups[g] = values_of(item, at + g * kLanes);
    if (P == 2 && keys % 2) {  // the last unit has one key of the sequence and one unused slot
      const uint32_t* last = groups[(keys - 1) / kLanes] + ptrdiff_t((keys - 1) % kLanes / P) * h_.head_dim;
      for (int d = 0; d < h_.head_dim; d++) s.tail[d] = last[d] & 0xffffu;
    }
    int d = 0;
    for (; d + 64 <= h_.head_dim; d += 64) accumulate_at<4>(s, rows, keys, groups, d, following);
    for (; d + 32 <= h_.head_dim; d += 32) accumulate_at<2>(s, rows, keys, groups, d, following);
    for (; d < h_.head_dim; d += 16) accumulate_at<1>(s, rows, keys, groups, d, following);
  }

  template <int V>
  void accumulate_at(Scratch& s, int rows, int keys, const uint32_t* const* groups, int d, const Following& following) {
    bool asks = following.groups[0];
    in_tiles(rows, [&]<int R>(std::integral_constant<int, R>, int r) {
      asks ? accumulate_rows<R, V, V>(s, r, keys, groups, d, following)
           : accumulate_rows<R, V, 0>(s, r, keys, groups, d, following);
      asks = false;
    });
  }

  template <int R, int V, int AHEAD>
  RAYLM_INLINE void accumulate_rows(Scratch& s, int r, int keys, const uint32_t* const* groups, int d,
                                    const Following& following) {
    f32x16 sums[R][V];
    float* o = &s.o[size_t(r) * h_.head_dim + d];
#pragma GCC unroll 6
    for (int i = 0; i < R; i++)
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) sums[i][v] = load<f32x16>(o + i * h_.head_dim + v * kLanes) * s.fade[r + i];
    const Unit* p = reinterpret_cast<const Unit*>(&s.p[size_t(r) * kChunk]);
    const int units = keys / P;
    for (int u = 0; u < units; u += kGroupUnits) {
      const int group = u / kGroupUnits;
      const uint32_t* streams[V];
      const char* next[V];
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) {
        streams[v] = groups[group] + d + v * kLanes;
        next[v] = following.groups[group] ? following.groups[group] + (d / kLanes + v) * kGroupUnits * line_stride()
                                          : reinterpret_cast<const char*>(streams[v]);
      }
      multiply<T, R, V, 0, AHEAD>(sums, p + u, kChunk / P, streams, h_.head_dim, std::min(kGroupUnits, units - u), next,
                                  line_stride());
    }
    if (P == 2 && keys % 2) {
      const uint32_t* streams[V];
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) streams[v] = &s.tail[d + v * kLanes];
      multiply<T, R, V>(sums, p + units, kChunk / P, streams, 0, 1);
    }
#pragma GCC unroll 6
    for (int i = 0; i < R; i++)
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) store(o + i * h_.head_dim + v * kLanes, sums[i][v]);
  }

  T* out_of(const Item& item, int r) const {
    return out_ + (ptrdiff_t(item.token + r / group_) * h_.heads + item.head * group_ + r % group_) * h_.head_dim;
  }

  void add(Scratch& s, int rows) {
    const int dim = h_.head_dim;
    for (int r = 0; r < rows; r++)
      add_stretch(&s.whole_o[size_t(r) * dim], s.whole_top[r], s.whole_total[r], &s.o[size_t(r) * dim], s.top[r],
                  s.total[r], dim);
  }

  void leave(int slot, Scratch& s, int rows) {
    std::copy_n(s.o.begin(), size_t(rows) * h_.head_dim, sums_of(slot, 0));
    for (int r = 0; r < rows; r++) {
      norms_of(slot, r)[0] = s.top[r];
      norms_of(slot, r)[1] = s.total[r];
    }
  }

  float* sums_of(int slot, int r) { return &space_.partial.sums[((first_slot_ + slot) * group_ + r) * h_.head_dim]; }
  float* norms_of(int slot, int r) { return &space_.partial.norms[((first_slot_ + slot) * group_ + r) * 2]; }

  // Adds the stretches of a single token that several items computed.
  void combine(const Item& item, Scratch& s) {
    const auto [begin, end, number] = span_of(item);
    const int stretches = (end + kStretch - 1) / kStretch - begin / kStretch;
    clear(s.whole_o, s.whole_top, s.whole_total, group_);
    for (int slot = item.slot; slot < item.slot + stretches; slot++)
      for (int r = 0; r < group_; r++)
        add_stretch(&s.whole_o[size_t(r) * h_.head_dim], s.whole_top[r], s.whole_total[r], sums_of(slot, r),
                    norms_of(slot, r)[0], norms_of(slot, r)[1], h_.head_dim);
    finish(item, s, group_);
  }

  void finish(const Item& item, Scratch& s, int rows) {
    for (int r = 0; r < rows; r++) {
      const float share = 1.0f / s.whole_total[r];
      T* out = out_of(item, r);
      for (int d = 0; d < h_.head_dim; d += kLanes)
        store_narrow(out + d, load<f32x16>(&s.whole_o[size_t(r) * h_.head_dim + d]) * share);
    }
  }

  const Batch& b_;
  const Heads& h_;
  const int group_, units_;
  const T* q_;
  const ptrdiff_t q_stride_;
  const uint32_t* keys_;
  const uint32_t* values_;
  T* out_;
  AttentionSpace<T>& space_;
  const size_t first_slot_;
};

// Writes one token's key and value of one head to its slot.
template <class T>
void write_kv(const Batch& b, const Heads& h, int token, int head, const T* key, const T* value, T* keys, T* values) {
  constexpr int P = Lane<T>::kPack;
  const int64_t slot = b.slots[token];
  const size_t block = size_t(slot / b.block_size) * h.kv_heads + head;
  const int at = int(slot % b.block_size), size = b.block_size, dim = h.head_dim;
  T* k = keys + block * dim * size + at * P;
  for (int d = 0; d < dim; d += P)
    for (int i = 0; i < P; i++) k[ptrdiff_t(d) * size + i] = key[d + i];
  T* v = values + (block * (size / P) + at / P) * dim * P + at % P;
  for (int d = 0; d < dim; d++) v[ptrdiff_t(d) * P] = value[d];
}

}  // namespace raylm
