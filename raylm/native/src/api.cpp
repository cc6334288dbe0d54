// Functions called from Python (library.py). Pointers are not checked; callers check shapes and dtypes.
#include "decoder.h"
#include "grouped_round.h"
#include "peaks.h"

namespace {

using namespace raylm;

template <class T>
void attend(Team& team, const Batch& batch, const Heads& heads, const void* q, const void* k, const void* v,
            ptrdiff_t q_stride, ptrdiff_t k_stride, ptrdiff_t v_stride, void* pool, int64_t blocks, void* out) {
  AttentionSpace<T> space(team.size(), heads);
  space.plan_for(batch, heads);
  T* keys = static_cast<T*>(pool);
  T* values = keys + size_t(blocks) * heads.kv_heads * heads.head_dim * batch.block_size;
  team.run([&](int thread) {
    team.each(batch.tokens * heads.kv_heads, [&](int piece) {
      const int token = piece / heads.kv_heads, head = piece % heads.kv_heads;
      write_kv(batch, heads, token, head, static_cast<const T*>(k) + token * k_stride + head * heads.head_dim,
               static_cast<const T*>(v) + token * v_stride + head * heads.head_dim, keys, values);
    });
    Attention<T>(batch, heads, static_cast<const T*>(q), q_stride, reinterpret_cast<const uint32_t*>(keys),
                 reinterpret_cast<const uint32_t*>(values), static_cast<T*>(out), space)
        .run(team, thread);
  });
}

template <class T>
void multiply_rows(Team& team, const Linear& w, const void* x, int rows, void* out, ptrdiff_t stride) {
  QuantizedSpace space;
  if (w.kind == kInt8 || w.kind == kInt4) space.reserve(rows, w.depth);
  const Quantized scratch = space.number(0, rows, w.depth);
  team.run([&](int) {
    linear<Into::kStore>(team, w, static_cast<const T*>(x), rows, scratch, Target<T>{static_cast<T*>(out), stride});
  });
}

template <class T>
void round_rows(Team& team, const void* weight, int rows, int depth, int group, uint8_t* values, float* scales,
                float* zeros) {
  const int groups = depth / group;
  team.run([&](int) {
    team.each(rows, [&](int row) {
      for (int g = 0; g < groups; g++) {
        const ptrdiff_t at = ptrdiff_t(row) * groups + g;
        round_int4(static_cast<const T*>(weight) + at * group, group, values + at * group, scales + at, zeros + at);
      }
    });
  });
}

}  // namespace

extern "C" {

void* raylm_team_new(int threads) { return new Team(threads); }
void raylm_team_use(void* team, int threads) { static_cast<Team*>(team)->use(threads); }
void raylm_team_free(void* team) { delete static_cast<Team*>(team); }

void raylm_pack(void* team, const uint32_t* from, int columns, int units, uint32_t* to) {
  auto& t = *static_cast<Team*>(team);
  t.run([&](int) { pack(t, from, columns, units, to); });
}

// Rounds `weight` [rows][depth] of type `kind` to values of the same shape, scales and zeros [rows][depth / group].
void raylm_round_int4(void* team, int kind, const void* weight, int rows, int depth, int group, uint8_t* values,
                      float* scales, float* zeros) {
  const auto call = kind == kBfloat16 ? round_rows<bf16> : round_rows<float>;
  call(*static_cast<Team*>(team), weight, rows, depth, group, values, scales, zeros);
}

// `kind` is the type of x and out: kFloat32 or kBfloat16.
void raylm_linear(void* team, int kind, const Linear* w, const void* x, int rows, void* out, int64_t stride) {
  auto& t = *static_cast<Team*>(team);
  kind == kBfloat16 ? multiply_rows<bf16>(t, *w, x, rows, out, stride) : multiply_rows<float>(t, *w, x, rows, out, stride);
}

void raylm_attention(void* team, int kind, const Batch* batch, const Heads* heads, const void* q, const void* k,
                     const void* v, int64_t q_stride, int64_t k_stride, int64_t v_stride, void* pool, int64_t blocks,
                     void* out) {
  auto& t = *static_cast<Team*>(team);
  const auto call = kind == kBfloat16 ? attend<bf16> : attend<float>;
  call(t, *batch, *heads, q, k, v, q_stride, k_stride, v_stride, pool, blocks, out);
}

void* raylm_decoder_new(void* team, int kind, const Model* model) {
  auto& t = *static_cast<Team*>(team);
  if (kind == kBfloat16) return new Decoder<bf16>(t, *model);
  return new Decoder<float>(t, *model);
}

void raylm_decoder_free(int kind, void* decoder) {
  if (kind == kBfloat16)
    delete static_cast<Decoder<bf16>*>(decoder);
  else
    delete static_cast<Decoder<float>*>(decoder);
}

void raylm_decoder_step(int kind, void* decoder, const Batch* batch, const int64_t* ids, const float* stream,
                        void* const* pools, int64_t blocks, void* result, const AdapterRun* adapters,
                        int num_adapters) {
  const Adapters runs{adapters, num_adapters};
  if (kind == kBfloat16)
    static_cast<Decoder<bf16>*>(decoder)->step(*batch, ids, stream, pools, blocks, result, runs);
  else
    static_cast<Decoder<float>*>(decoder)->step(*batch, ids, stream, pools, blocks, result, runs);
}

void raylm_decoder_logits(int kind, void* decoder, const void* hidden, int rows, float* out, int64_t stride) {
  if (kind == kBfloat16)
    static_cast<Decoder<bf16>*>(decoder)->logits(static_cast<const bf16*>(hidden), rows, out, stride);
  else
    static_cast<Decoder<float>*>(decoder)->logits(static_cast<const float*>(hidden), rows, out, stride);
}

void raylm_peaks(void* team, const float* logits, int rows, int64_t columns, int64_t stride, float* values,
                 int64_t* at) {
  peaks(*static_cast<Team*>(team), logits, rows, columns, stride, values, at);
}

// Seconds since creation in linear layers, attention, and the rest.
const double* raylm_decoder_seconds(int kind, void* decoder) {
  if (kind == kBfloat16) return static_cast<Decoder<bf16>*>(decoder)->seconds();
  return static_cast<Decoder<float>*>(decoder)->seconds();
}

}  // extern "C"
