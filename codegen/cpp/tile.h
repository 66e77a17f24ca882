// Register tiles for matrix products: R rows times V vectors of columns, accumulated over the depth.
#pragma once
#include "vector.h"

namespace fuser {

#if defined(__AVX512F__)
constexpr int vector_registers = 32;
#else
constexpr int vector_registers = 16;
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
#if defined(__AVX2__)
      asm("" : "+x"(line[v]));  // keep it in a register: read once, not once per row
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

template <int R, int V>
static inline __attribute__((always_inline)) void clear(vec (&acc)[R][V]) {
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) acc[r][v] = vec{};
}

// Longer sums are made of partial ones, whose rounding errors don't pile up. For few columns the library takes dot
// products in many short sums; to be as exact, so does a narrow tile.
constexpr int64_t depth_per_sum(int vectors) { return vectors == 1 ? 24 : 192; }

// How rows of output are divided among threads: blocks of rows that are a multiple of the tile.
static inline int64_t block_of_rows(int64_t rows, int64_t tasks_wanted, int64_t tile, int64_t most) {
  int64_t block = (rows + tasks_wanted - 1) / tasks_wanted;
  block = block > most ? most : block;
  return (block + tile - 1) / tile * tile;
}

}  // namespace fuser
