// Drafts: guesses of the next tokens of sequences. A guess is the text after an earlier occurrence of the last tokens,
// in the same sequence or in recent answers. This is a separate library, without the kernels, because workers with a
// GPU need it too. Pointers are not checked, and calls must come from one thread at a time.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace raylm {

constexpr int kLengths[] = {1, 2, 3, 4, 8, 16};  // tokens of an n-gram, by level
constexpr int kLevels = 6, kLongest = 16;
constexpr int32_t kMostVotes = 4;
constexpr int64_t kNobody = -1;

// Kinds of drafts: none, by the level of a match in the own text, continued from there, resumed after a wrong token, by
// the level of a match in an answer, continued from there, all that the form of the answer allows.
enum Kind { kNone, kOwn, kKept = kOwn + kLevels, kResumed, kAnswer, kAnswerKept = kAnswer + kLevels, kForced, kKinds };
// The prior of each kind: how many of ten drafts are expected to hold.
constexpr double kExpected[kKinds] = {0, 1, 3, 5, 6, 7.5, 8, 9, 2, 0.7, 2, 3.5, 5, 7, 8, 9, 9.5};
constexpr double kDecay = 0.8, kWeight = 3, kMemory = 256;
// Bounds of a draft's probability: no draft is certain, and a draft below one in fifty is not tried. The last is the gain
// that a step with drafts must promise over a step without.
constexpr double kMostChance = 0.98, kLeastChance = 0.02, kWorthwhile = 1.03;

// The end of an n-gram. Of occurrences with different next tokens, the majority stays.
struct Entry {
  int32_t end, votes;
};

// A hash table of the ends of n-grams. Entries are compared with the text, because they may belong to another n-gram.
class Index {
 public:
  explicit Index(int bits) : shift_(64 - bits), entries_(size_t(1) << bits) {}

  // Calls `visit(level, entry)` for the n-grams of `tokens` that end at `end`, of at most `known` tokens.
  template <class Visit>
  void each(const int32_t* tokens, int64_t end, int64_t known, uint64_t salt, const Visit& visit) {
    uint64_t hash = (salt + 1) * 0xD6E8FEB86659FD93u;  // far from any token, so that no token makes it zero
    for (int back = 0, level = 0; level < kLevels && kLengths[level] <= known; level++) {
      for (; back < kLengths[level]; back++) {
        hash = (hash ^ uint32_t(tokens[end - back])) * 0x9E3779B97F4A7C15u;
        hash ^= hash >> 32;
      }
      visit(level, entries_[hash * 0xC2B2AE3D27D4EB4Fu >> shift_]);
    }
  }

 private:
  int shift_;
  std::vector<Entry> entries_;
};

// Sets the end of the n-gram of `entry` to `end`. `same`: the entry had this n-gram. `agrees`: its next token was the
// same.
void vote(Entry& entry, int64_t end, bool same, bool agrees) {
  if (same && !agrees && --entry.votes > 0) return;
  entry = {int32_t(end), same && agrees ? std::min(entry.votes + 1, kMostVotes) : 1};
}

// The tokens of recent answers, in a ring. Every answer has an owner, a number from 0 on. Only answers of the same
// owner are found.
class History {
 public:
  History(int ring_bits, int index_bits)
      : mask_((int64_t(1) << ring_bits) - 1), tokens_(mask_ + 1), owners_(mask_ + 1, kNobody), index_(index_bits) {}

  // Stores an answer, the last of `count` tokens. Of the `before` earlier tokens, only those that help to find its
  // first tokens are indexed.
  void append(const int32_t* tokens, int64_t count, int64_t before, int64_t owner) {
    const int64_t first = std::max(std::max<int64_t>(0, before - kLongest), count - (mask_ + 1) / 2);
    tokens += first, count -= first;
    const int64_t start = written_;
    for (int64_t i = 0; i <= count; i++, written_ = (written_ + 1) & mask_) {
      tokens_[written_] = i < count ? tokens[i] : -1;
      owners_[written_] = i < count ? owner : kNobody;
    }
    for (int64_t i = 0; i + 1 < count; i++) {  // there is nothing to copy after the last token
      index_.each(tokens, i, i + 1, owner, [&](int level, Entry& entry) {
        const bool same = entry.votes && is(entry.end, tokens + i, level, owner);
        vote(entry, (start + i) & mask_, same, same && tokens_[(entry.end + 1) & mask_] == tokens[i + 1]);
      });
    }
  }

  // The level of the longest match of the end of `known` tokens (-1 for none), and the place of the tokens after it.
  int search(const int32_t* tokens, int64_t known, int64_t owner, int64_t& source) {
    int found = -1;
    index_.each(tokens, known - 1, known, owner, [&](int level, const Entry& entry) {
      if (!entry.votes || !is(entry.end, tokens + known - 1, level, owner)) return;
      found = level, source = (entry.end + 1) & mask_;
    });
    return found;
  }

  // Copies at most `most` tokens of the owner from `source` on. Returns their number.
  int read(int64_t source, int64_t owner, int most, int32_t* out) const {
    int count = 0;
    for (; count < most && owners_[(source + count) & mask_] == owner; count++) out[count] = tokens_[(source + count) & mask_];
    return count;
  }

  int64_t next(int64_t source, int64_t steps) const { return (source + steps) & mask_; }

 private:
  bool is(int64_t end, const int32_t* last, int level, int64_t owner) const {
    for (int back = 0; back < kLengths[level]; back++) {
      const int64_t at = (end - back) & mask_;
      if (tokens_[at] != last[-back] || owners_[at] != owner) return false;
    }
    return true;
  }

  int64_t mask_, written_ = 0;
  std::vector<int32_t> tokens_;
  std::vector<int64_t> owners_;
  Index index_;
};

// The columns of Drafts (raylm/worker/speculation/drafts.py), which owns them.
struct DraftColumns {
  int32_t rows, most, block_size, index_bits, ring_bits, unused;
  // By row: drafts [rows][most], their number, and the probability of the next one.
  int32_t *tokens, *counts;
  double* chances;
  // By place in the step: its columns, whether it may have drafts, its number of drafts, and the places in their new
  // order.
  int64_t *step_rows, *computed, *step_counts, *draws, *may, *added, *order;
};

// The columns of InputBatch.
struct BatchColumns {
  int64_t stride;
  int32_t *token_ids, *num_tokens, *limits, *num_blocks;
};

struct Row {
  uint64_t salt = 0;  // distinguishes rows and sequences of earlier use
  int64_t owner = 0, indexed = 0, lag = 0, source = 0, made_at = 0;
  int kind = kNone;
  double right = 0, tested = 0;
};

// A row copies from its own text at a constant distance, its lag, or from an earlier answer, as long as the drafts are
// right. Then the indexes are searched again. Drafts are checked even if no step verified them.
class Drafts {
 public:
  explicit Drafts(const DraftColumns& columns)
      : c_(columns), rows_(columns.rows), index_(columns.index_bits), history_(columns.ring_bits, columns.index_bits) {
    std::copy(kExpected, kExpected + kKinds, right_of_kind_);
    std::fill(tested_of_kind_, tested_of_kind_ + kKinds, 10.0);
  }

  void bind(const BatchColumns& batch) { b_ = batch; }

  void forget(int row, int64_t owner) {
    rows_[row] = {.salt = ++sequences_, .owner = owner};
    c_.counts[row] = 0, c_.chances[row] = 0;
  }

  void keep(int row, int64_t before) { history_.append(text(row), b_.num_tokens[row], before, rows_[row].owner); }

  // Updates the step's columns for rows that decode, and removes rows at their limit. Returns the number of places that
  // remain; `order` has their order.
  int prepare(int places) {
    int kept = 0;
    for (int at = 0; at < places; at++) {
      const int64_t row = c_.step_rows[at], known = b_.num_tokens[row];
      const bool decodes = c_.step_counts[at] == 1 && c_.draws[at] == 1;
      if (decodes && known >= b_.limits[row]) continue;
      c_.step_rows[kept] = row, c_.step_counts[kept] = c_.step_counts[at], c_.draws[kept] = c_.draws[at];
      c_.computed[kept] = decodes ? known - 1 : c_.computed[at];
      c_.may[kept] = decodes;
      c_.added[kept] = 0, c_.order[kept++] = at;
    }
    return kept;
  }

  // Learns from the tokens since the last drafts of rows that may have drafts, and makes new drafts. Returns whether
  // there are any.
  bool renew(int places) {
    bool any = false;
    for (int at = 0; at < places; at++) {
      if (!c_.may[at]) continue;
      const int64_t row = c_.step_rows[at], known = b_.num_tokens[row];
      learn(row, known);
      if (rows_[row].kind == kNone) find(row, known);
      fill(row, known);
      update_chance(row);
      any |= c_.chances[row] > kLeastChance;
    }
    return any;
  }

  // Only these tokens may come, or another spelling of them.
  void force(int row, const int32_t* tokens, int count) {
    c_.counts[row] = std::min(count, c_.most);
    std::copy(tokens, tokens + c_.counts[row], c_.tokens + ptrdiff_t(row) * c_.most);
    rows_[row].kind = kForced;
    update_chance(row);
  }

  // Cuts the row's drafts to a number.
  void cut(int row, int count) {
    c_.counts[row] = count;
    if (!count) rows_[row].kind = kNone;
    update_chance(row);
  }

  // Writes drafts after the known tokens. Returns their total number, and the number of each place in `added`.
  //
  // The j-th draft of a row is right with the probability `chance` to the power of j. Drafts are sorted by descending
  // probability, and each adds a token to the step. The best number of drafts has the highest ratio of expected tokens
  // to predicted time, a line through `knots`. At most `most_added` are chosen.
  int choose(int places, int most_added, int knots, const double* sizes, const double* seconds) {
    gains_.clear();
    double draws = 0, tokens = 0;
    for (int at = 0; at < places; at++) {
      draws += c_.draws[at] > 0, tokens += c_.step_counts[at];
      if (!c_.may[at]) continue;
      const int64_t row = c_.step_rows[at], known = b_.num_tokens[row];
      const int64_t held = int64_t(b_.num_blocks[row]) * c_.block_size;
      const int64_t most = std::min<int64_t>(std::min<int64_t>(b_.limits[row] - 1, held) - known, c_.counts[row]);
      const double chance = std::min(c_.chances[row], kMostChance);
      double gain = chance;
      for (int64_t j = 0; j < most && gain > kLeastChance; j++, gain *= chance) gains_.push_back({gain, at});
    }
    std::stable_sort(gains_.begin(), gains_.end(), [](const Gain& a, const Gain& b) { return a.gain > b.gain; });
    const Line line{knots, sizes, seconds};
    double expected = draws, best_rate = draws * kWorthwhile / line.at(tokens);
    int best = 0;
    for (int n = 1; n <= std::min<int>(gains_.size(), most_added); n++) {
      expected += gains_[n - 1].gain;
      const double rate = expected / line.at(tokens + n);
      if (rate > best_rate) best_rate = rate, best = n;
    }
    for (int n = 0; n < best; n++) write(gains_[n].at);
    return best;
  }

  // Assigns the drafts to the places, places with one token first.
  void arrange(int places) {
    order_.clear();
    for (int pass = 0; pass < 2; pass++)
      for (int at = 0; at < places; at++)
        if ((c_.step_counts[at] + c_.added[at] > 1) == (pass == 1)) order_.push_back(at);
    sort(c_.step_rows), sort(c_.computed), sort(c_.step_counts), sort(c_.draws), sort(c_.added), sort(c_.order);
    for (int at = 0; at < places; at++) c_.step_counts[at] += c_.added[at], c_.draws[at] += c_.added[at];
  }

 private:
  struct Gain {
    double gain;
    int at;
  };

  struct Line {
    int knots;
    const double *x, *y;
    double at(double where) const {
      const int right = std::clamp<int>(std::upper_bound(x, x + knots, where) - x, 1, knots - 1);
      return y[right - 1] + (where - x[right - 1]) / (x[right] - x[right - 1]) * (y[right] - y[right - 1]);
    }
  };

  const int32_t* text(int64_t row) const { return b_.token_ids + row * b_.stride; }
  double expected(int kind) const { return right_of_kind_[kind] / tested_of_kind_[kind]; }

  void write(int at) {
    const int64_t row = c_.step_rows[at], number = c_.added[at]++;
    b_.token_ids[row * b_.stride + b_.num_tokens[row] + number] = c_.tokens[row * c_.most + number];
  }

  void sort(int64_t* column) {
    sorted_.clear();
    for (const int at : order_) sorted_.push_back(column[at]);
    std::copy(sorted_.begin(), sorted_.end(), column);
  }

  void update_chance(int64_t row) {
    const Row& r = rows_[row];
    c_.chances[row] = r.kind ? (r.right + kWeight * expected(r.kind)) / (r.tested + kWeight) : 0;
  }

  // Compares the drafts with the new tokens, up to the first wrong one. A row whose drafts were right continues to
  // copy. A lag that was wrong once, after it was right, is kept.
  void learn(int64_t row, int64_t known) {
    Row& r = rows_[row];
    const int64_t fresh = std::max<int64_t>(known - r.made_at, 0), count = c_.counts[row];
    const int came = std::min(fresh, count), kind = r.kind;
    const int32_t *drafts = c_.tokens + row * c_.most, *tokens = text(row) + r.made_at;
    const int right = std::mismatch(drafts, drafts + came, tokens).first - drafts;
    const int tested = std::min(right + 1, came);
    r.right = r.right * kDecay + right, r.tested = r.tested * kDecay + tested;
    right_of_kind_[kind] += right, tested_of_kind_[kind] += tested;
    if (tested_of_kind_[kind] > kMemory) right_of_kind_[kind] *= 0.5, tested_of_kind_[kind] *= 0.5;
    const bool from_answer = kind >= kAnswer && kind < kForced;
    const bool over = from_answer && fresh >= count && count < c_.most;
    const bool held = kind != kNone && kind != kForced && right == came && !over;
    r.kind = held ? (from_answer ? kAnswerKept : kKept) : kNone;
    r.source = history_.next(r.source, fresh);
    if (!held && kind != kKept && kind != kForced) r.lag = 0;
  }

  // Chooses the most probable source for a row without drafts.
  void find(int64_t row, int64_t known) {
    Row& r = rows_[row];
    const int32_t* tokens = text(row);
    const auto is = [&](const Entry& entry, int64_t end, int level) {
      if (!entry.votes || entry.end < kLengths[level] - 1 || entry.end >= end) return false;
      return std::equal(tokens + entry.end - kLengths[level] + 1, tokens + entry.end + 1, tokens + end - kLengths[level] + 1);
    };
    for (; r.indexed < known - 1; r.indexed++) {
      index_.each(tokens, r.indexed, r.indexed + 1, r.salt, [&](int level, Entry& entry) {
        const bool same = is(entry, r.indexed, level);
        vote(entry, r.indexed, same, same && tokens[entry.end + 1] == tokens[r.indexed + 1]);
      });
    }
    int own = r.lag ? kResumed : kNone;
    int64_t lag = r.lag, source = 0;
    index_.each(tokens, known - 1, known, r.salt, [&](int level, const Entry& entry) {
      if (is(entry, known - 1, level)) own = kOwn + level, lag = known - 1 - entry.end;
    });
    const int level = history_.search(tokens, known, r.owner, source), answer = level < 0 ? kNone : kAnswer + level;
    const bool copies_answer = expected(answer) > expected(own);
    r.kind = copies_answer ? answer : own;
    r.lag = copies_answer ? 0 : lag;
    r.source = source;
  }

  void fill(int64_t row, int64_t known) {
    Row& r = rows_[row];
    int32_t* drafts = c_.tokens + row * c_.most;
    r.made_at = known;
    c_.counts[row] = r.kind == kNone ? 0 : c_.most;
    if (r.kind >= kAnswer) {
      if (!(c_.counts[row] = history_.read(r.source, r.owner, c_.most, drafts))) r.kind = kNone;
    } else if (r.kind != kNone) {
      const int32_t* source = text(row) + known - r.lag;
      for (int j = 0; j < c_.most; j++) drafts[j] = j < r.lag ? source[j] : drafts[j - r.lag];
    }
  }

  DraftColumns c_;
  BatchColumns b_{};
  std::vector<Row> rows_;
  uint64_t sequences_ = 0;
  Index index_;
  History history_;
  double right_of_kind_[kKinds], tested_of_kind_[kKinds];
  std::vector<Gain> gains_;
  std::vector<int> order_;
  std::vector<int64_t> sorted_;
};

}  // namespace raylm

extern "C" {

using raylm::Drafts;

void* raylm_drafts_new(const raylm::DraftColumns* columns) { return new Drafts(*columns); }
void raylm_drafts_free(void* drafts) { delete static_cast<Drafts*>(drafts); }
void raylm_drafts_bind(void* drafts, const raylm::BatchColumns* batch) { static_cast<Drafts*>(drafts)->bind(*batch); }
void raylm_drafts_forget(void* drafts, int row, int64_t owner) { static_cast<Drafts*>(drafts)->forget(row, owner); }
void raylm_drafts_keep(void* drafts, int row, int64_t before) { static_cast<Drafts*>(drafts)->keep(row, before); }
int raylm_drafts_prepare(void* drafts, int places) { return static_cast<Drafts*>(drafts)->prepare(places); }
int raylm_drafts_renew(void* drafts, int places) { return static_cast<Drafts*>(drafts)->renew(places); }
void raylm_drafts_force(void* drafts, int row, const int32_t* tokens, int count) {
  static_cast<Drafts*>(drafts)->force(row, tokens, count);
}
void raylm_drafts_cut(void* drafts, int row, int count) { static_cast<Drafts*>(drafts)->cut(row, count); }
int raylm_drafts_choose(void* drafts, int places, int most_added, int knots, const double* sizes, const double* seconds) {
  return static_cast<Drafts*>(drafts)->choose(places, most_added, knots, sizes, seconds);
}
int raylm_drafts_renew_and_choose(void* drafts, int places, int most_added, int knots, const double* sizes,
                                  const double* seconds) {
  auto& its = *static_cast<Drafts*>(drafts);
  return its.renew(places) ? its.choose(places, most_added, knots, sizes, seconds) : 0;
}
void raylm_drafts_arrange(void* drafts, int places) { static_cast<Drafts*>(drafts)->arrange(places); }

}  // extern "C"
