// Register tiles for matrix products: R rows times V vectors of columns, accumulated over the depth.
#pragma once
#include "vector.h"

namespace fuser {

#if defined(__AVX512VL__)
constexpr int vector_registers = 16;  // of the 32: more rows would need more pointers than there are general registers
#define FUSER_IN_REGISTER(value) "+v"(value)
#else
constexpr int vector_registers = 16;
#define FUSER_IN_REGISTER(value) "+x"(value)
#endif

// Rows of the widest tile with V vectors per row: leaves registers for V panel vectors and a broadcast element.
template <int V>
constexpr int most_rows = V == 1 ? vector_registers / 2 : (vector_registers - V - 1) / V;

// acc[r][v] += sum over k of rows[r][k] * panel[k][v]; a panel is `depth` lines of V aligned vectors.
template <int R, int V>
static inline __attribute__((always_inline)) void accumulate(vec (&acc)[R][V], const real* const (&rows)[R],
                                                             const real* panel, int64_t depth) {
  for (int64_t k = 0; k < depth; ++k) {
    vec line[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      line[v] = reinterpret_cast<const vec*>(panel)[k * V + v];
#if FUSER_VECTOR_BYTES >= 32
      asm("" : FUSER_IN_REGISTER(line[v]));  // keep it in a register: read once, not once per row
#endif
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const real a = rows[r][k];
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) acc[r][v] += a * line[v];
    }
  }
}

#if FUSER_VECTOR_BYTES == 32
// Half a vector in both halves; the lower half of one and the upper half of another; an upper half moved down.
FUSER_INLINE float_lanes both_halves(const float* p) {
  return __builtin_ia32_vbroadcastf128_ps256(reinterpret_cast<const four_floats*>(p));
}
FUSER_INLINE double_lanes both_halves(const double* p) {
  return __builtin_ia32_vbroadcastf128_pd256(reinterpret_cast<const two_doubles*>(p));
}
FUSER_INLINE float_lanes halves(float_lanes low, float_lanes high) { return __builtin_ia32_blendps256(low, high, 0xf0); }
FUSER_INLINE double_lanes halves(double_lanes low, double_lanes high) { return __builtin_ia32_blendpd256(low, high, 0xc); }
FUSER_INLINE float_lanes everywhere(float x) { return float_lanes{x, x, x, x, x, x, x, x}; }
FUSER_INLINE double_lanes everywhere(double x) { return double_lanes{x, x, x, x}; }
FUSER_INLINE float_lanes upper_half(float_lanes v) { return __builtin_shufflevector(v, v, 4, 5, 6, 7, 4, 5, 6, 7); }
FUSER_INLINE double_lanes upper_half(double_lanes v) { return __builtin_shufflevector(v, v, 2, 3, 2, 3); }

// The same where at most half of a row's last vector is used: two rows share one register for it.
template <int R, int V>
static inline __attribute__((always_inline)) void accumulate_paired(vec (&acc)[R][V], const real* const (&rows)[R],
                                                                    const real* panel, int64_t depth) {
  static_assert(R % 2 == 0);
  vec last[R / 2];
  for (int r = 0; r < R; r += 2) last[r / 2] = vec{};
  for (int64_t k = 0; k < depth; ++k) {
    const real* from = panel + k * V * width;
    vec line[V];
    for (int v = 0; v < V - 1; ++v) line[v] = load(from + v * width);
    line[V - 1] = both_halves(from + (V - 1) * width);
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) asm("" : FUSER_IN_REGISTER(line[v]));
#pragma GCC unroll 16
    for (int r = 0; r < R; r += 2) {
      vec a = everywhere(rows[r][k]), b = everywhere(rows[r + 1][k]);
      asm("" : FUSER_IN_REGISTER(a), FUSER_IN_REGISTER(b));
#pragma GCC unroll 4
      for (int v = 0; v < V - 1; ++v) acc[r][v] += a * line[v], acc[r + 1][v] += b * line[v];
      last[r / 2] += halves(a, b) * line[V - 1];
    }
  }
  for (int r = 0; r < R; r += 2) acc[r][V - 1] = last[r / 2], acc[r + 1][V - 1] = upper_half(last[r / 2]);
}
#endif

template <int R, int V>
static inline __attribute__((always_inline)) void clear(vec (&acc)[R][V]) {
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) acc[r][v] = vec{};
}

// Longer sums are made of partial ones, whose rounding errors don't pile up. For few columns the library takes dot
// products in many short sums; to be as exact, so does a narrow tile.
constexpr int64_t depth_per_sum(int vectors) { return vectors == 1 ? 24 : 64; }

// How rows of output are divided among threads: blocks of rows that are a multiple of the tile.
static inline int64_t block_of_rows(int64_t rows, int64_t tasks_wanted, int64_t tile, int64_t most) {
  int64_t block = (rows + tasks_wanted - 1) / tasks_wanted;
  block = block > most ? most : block;
  return (block + tile - 1) / tile * tile;
}

}  // namespace fuser
