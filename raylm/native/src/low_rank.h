// Products of LoRA adapters (Hu et al. 2021), which are added to linear layers: `out += up . (down . x)`.
//
// A step's tokens form runs with the same adapter. Each layer has two phases. The first computes every run's product
// with `down`, in rows of its rank. After the layer's own product, the second multiplies by `up`, each part of a fused
// layer in its own columns.
#pragma once

#include <algorithm>
#include <vector>

#include "linear.h"

namespace raylm {

enum Site { kQkv, kOutput, kGateUp, kDown, kSites };

// Shared with Python (library.py): keep the order.
struct LowRankPart {
  Linear up;        // [columns of the part][rank], the depth a multiple of 16
  int32_t column;   // first column of the part in the layer's output
  int32_t rank_at;  // first place of its rank in the result of `down`
};

struct LowRank {
  Linear down;    // the parts' products, stacked
  int32_t parts;  // 0 if the adapter does not change the layer
  int32_t unused;
  LowRankPart part[3];
};

struct AdapterRun {
  const LowRank* sites;  // [layers][kSites]
  int32_t start, count;  // tokens
};

struct Adapters {
  const AdapterRun* runs;
  int count;
};

template <class T>
class LowRankProducts {
  typedef typename Lane<T>::Unit Unit;

 public:
  // Cuts the runs of a step into chunks that threads share. Called before the team runs.
  void plan_for(const Adapters& adapters) {
    chunks_.clear();
    for (int i = 0; i < adapters.count; i++) {
      const AdapterRun& run = adapters.runs[i];
      for (int at = 0; at < run.count; at += kChunk)
        chunks_.push_back({run.sites, run.start + at, std::min(int(kChunk), run.count - at)});
    }
    low_.resize(std::max(low_.size(), chunks_.size() * kChunk * kWidest));
  }

  bool any() const { return !chunks_.empty(); }

  // The products of a layer's input with `down`. Every thread calls it. `x` is [tokens][depth].
  void begin(Team& team, int site, const T* x, int depth) {
    each(team, [&](int at) { return tasks(chunks_[at].sites[site].down.columns, kDownColumns); },
         [&](int at, int task) { down(at, site, task, x, depth); });
  }

  // Adds to the output of the layer, after its own product. Every thread calls it.
  template <class Out>
  void finish(Team& team, int site, Target<Out> target) {
    each(team,
         [&](int at) {
           int count = 0;
           const LowRank& w = chunks_[at].sites[site];
           for (int p = 0; p < w.parts; p++) count += tasks(w.part[p].up.columns, kUpColumns);
           return count;
         },
         [&](int at, int task) { up(at, site, task, target); });
  }

 private:
  struct Chunk {
    const LowRank* sites;
    int start, rows;
  };

  static constexpr int kChunk = 48, kWidest = 3 * 64;
  static constexpr int kDownColumns = 32, kUpColumns = 256;

  static int tasks(int columns, int each) { return (columns + each - 1) / each; }

  // The tasks of all chunks, numbered in order, as one phase.
  template <class Count, class Work>
  void each(Team& team, const Count& count, const Work& work) {
    int total = 0;
    for (int at = 0; at < int(chunks_.size()); at++) total += count(at);
    team.share(total, [&](int task, int) {
      int at = 0;
      for (int here; task >= (here = count(at)); at++) task -= here;
      work(at, task);
    });
  }

  // The result of `down` for a chunk, the parts in order, each [rows][its rank].
  T* low(int at, int rank_at) { return &low_[size_t(at) * kChunk * kWidest] + chunks_[at].rows * rank_at; }

  void down(int at, int site, int task, const T* x, int depth) {
    const Chunk& chunk = chunks_[at];
    const LowRank& w = chunk.sites[site];
    const Unit* from = reinterpret_cast<const Unit*>(x + ptrdiff_t(chunk.start) * depth);
    columns(w.down, from, chunk.rows, task * kDownColumns, kDownColumns, [&](int row, int column, f32x16 sum) {
      int p = w.parts - 1;
      while (column < w.part[p].rank_at) p--;
      const LowRankPart& part = w.part[p];
      store_narrow(low(at, part.rank_at) + row * part.up.depth + column - part.rank_at, sum);
    });
  }

  template <class Out>
  void up(int at, int site, int task, Target<Out> target) {
    const Chunk& chunk = chunks_[at];
    const LowRank& w = chunk.sites[site];
    int p = 0;
    while (task >= tasks(w.part[p].up.columns, kUpColumns)) task -= tasks(w.part[p++].up.columns, kUpColumns);
    const LowRankPart& part = w.part[p];
    Out* out = target.out + chunk.start * target.stride + part.column;
    const Unit* from = reinterpret_cast<const Unit*>(low(at, part.rank_at));
    columns(part.up, from, chunk.rows, task * kUpColumns, kUpColumns, [&](int row, int column, f32x16 sum) {
      Out* to = out + row * target.stride + column;
      store_narrow(to, load_wide(to) + sum);
    });
  }

  // Columns `first` .. of `w` times `rows` of x; `put(row, column, sums of 16 columns)`.
  template <class Put>
  static void columns(const Linear& w, const Unit* x, int rows, int first, int count, const Put& put) {
    constexpr auto tile_of = tiles_of<T, 0>(std::make_integer_sequence<int, kRows>());
    const int groups = w.columns / kLanes, end = std::min(groups, (first + count) / kLanes);
    const ptrdiff_t size = ptrdiff_t(w.units) * kLanes;
    for (int group = first / kLanes; group < end; group += 2) {
      const int second = std::min(group + 1, groups - 1);
      const uint32_t* const streams[2] = {w.packed + group * size, w.packed + second * size};
      for (int begin = 0; begin < rows; begin += kRows) {
        const int some = std::min(kRows, rows - begin);
        f32x16 sums[kRows][2];
        tile_of[some - 1](streams, x + ptrdiff_t(begin) * w.units, w.units, nullptr, sums[0]);
        for (int row = 0; row < some; row++) {
          put(begin + row, group * kLanes, sums[row][0]);
          if (second > group) put(begin + row, second * kLanes, sums[row][1]);
        }
      }
    }
  }

  std::vector<Chunk> chunks_;
  std::vector<T> low_;
};

}  // namespace raylm
