// Arenas, packed weights, and the hash that tells whether a weight has changed.
#include <sys/mman.h>
#ifdef __AVX2__
#include <immintrin.h>
#endif

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

#include <c10/core/CPUAllocator.h>

#include "plan.h"

namespace fuser {

namespace {

constexpr size_t huge_page = size_t{2} << 20;

char* allocate(size_t size) {
  const size_t alignment = size >= 2 * huge_page ? huge_page : 64;
  size = (size + alignment - 1) / alignment * alignment;
  void* data = std::aligned_alloc(alignment, size);
  if (data == nullptr) throw std::bad_alloc();
  if (alignment == huge_page) madvise(data, size, MADV_HUGEPAGE);
  return static_cast<char*>(data);
}

}  // namespace

ArenaPool::~ArenaPool() {
  for (Block& block : free_) std::free(block.data);
}

ArenaPool::Block ArenaPool::take(size_t size) {
  Block block;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!free_.empty()) {
      block = free_.back();
      free_.pop_back();
    }
  }
  if (block.size < size) {
    std::free(block.data);
    block = {allocate(size), size};
  }
  return block;
}

void ArenaPool::give_back(Block block) {
  std::lock_guard<std::mutex> lock(mutex_);
  free_.push_back(block);
}

// Small results come and go by the million: blocks of a few sizes are kept instead of given back to malloc, which
// consolidates its heap over and over for the larger of them. A busy lock (or one that a fork left locked) is not
// waited for.
namespace {

constexpr int smallest_block = 6, size_classes = 11;  // 64 bytes to 64 KiB
constexpr int most_kept = 16;

struct KeptBlocks {
  std::mutex mutex;
  void* block[size_classes][most_kept];
  int count[size_classes] = {};
};
KeptBlocks& kept_blocks() {
  static KeptBlocks* kept = new KeptBlocks;  // never destroyed: tensors may outlive everything
  return *kept;
}

template <int size_class>
void recycle(void* data) {
  KeptBlocks& kept = kept_blocks();
  std::unique_lock<std::mutex> lock(kept.mutex, std::try_to_lock);
  if (lock && kept.count[size_class] < most_kept)
    kept.block[size_class][kept.count[size_class]++] = data;
  else
    std::free(data);
}

struct ResultAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    static constexpr c10::DeleterFnPtr deleters[size_classes] = {recycle<0>, recycle<1>, recycle<2>, recycle<3>,
                                                                 recycle<4>, recycle<5>, recycle<6>, recycle<7>,
                                                                 recycle<8>, recycle<9>, recycle<10>};
    int size_class = 0;
    while (size_class < size_classes && size > size_t{1} << (size_class + smallest_block)) ++size_class;
    if (size == 0 || size_class == size_classes || c10::memoryProfilingEnabled())
      return c10::GetDefaultCPUAllocator()->allocate(size);
    void* data = nullptr;
    KeptBlocks& kept = kept_blocks();
    {
      std::unique_lock<std::mutex> lock(kept.mutex, std::try_to_lock);
      if (lock && kept.count[size_class] > 0) data = kept.block[size_class][--kept.count[size_class]];
    }
    if (data == nullptr) data = fuser::allocate(size_t{1} << (size_class + smallest_block));
    return {data, data, deleters[size_class], at::kCPU};
  }
  void copy_data(void* to, const void* from, size_t count) const override { default_copy_data(to, from, count); }
};

}  // namespace

c10::Allocator* result_allocator() {
  static ResultAllocator* allocator = new ResultAllocator;
  return allocator;
}

Packed::Packed(size_t size) : hash{0, 0}, data(allocate(std::max<size_t>(size, 64))) {}

Packed::~Packed() { std::free(data); }

std::shared_ptr<PackSlot> PackStore::slot(const std::string& key) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto& slot = slots_[key];
  if (!slot) slot = std::make_shared<PackSlot>();
  return slot;
}

// The hash: 8 lanes of 64 bits, kept as two vectors. Each 64-byte stripe is mixed with secrets that differ by position;
// the two halves of every lane are multiplied with one another, and the lane itself is added to its neighbour, so that
// neither sign flips nor exchanged elements cancel. A scramble after every block makes the blocks' order count.

namespace {

typedef uint64_t vec __attribute__((vector_size(32)));

constexpr int width = 4, parts = 2, lanes = width * parts;
constexpr size_t stripe = lanes * sizeof(uint64_t), stripes_per_block = 16, block_bytes = stripe * stripes_per_block;
constexpr size_t chunk_bytes = size_t{256} << 10;  // hashed independently, so that threads can share the work

constexpr uint64_t scatter(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
  x = (x ^ x >> 27) * 0x94d049bb133111ebu;
  return x ^ x >> 31;
}

// One row per stripe of a block, and one for the scramble.
struct Secrets {
  alignas(64) uint64_t row[stripes_per_block + 1][lanes] = {};
  constexpr Secrets() {
    for (size_t r = 0; r <= stripes_per_block; ++r)
      for (int i = 0; i < lanes; ++i) row[r][i] = scatter(r * lanes + i) | 1;
  }
};
constexpr Secrets secrets;

inline vec load(const void* data) {
  vec v;
  std::memcpy(&v, data, sizeof v);
  return v;
}

// Per lane, the product of the low halves. Spelled out: the compiler makes it three multiplications of 32 bits.
inline vec multiply_low(vec a, vec b) {
#ifdef __AVX2__
  return reinterpret_cast<vec>(_mm256_mul_epu32(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)));
#else
  return (a & 0xffffffffu) * (b & 0xffffffffu);
#endif
}

struct Sums {
  vec part[parts];

  void mix(const char* data, size_t row) {
    for (int i = 0; i < parts; ++i) {
      const vec v = load(data + i * sizeof(vec)), keyed = v ^ load(secrets.row[row] + i * width);
      part[i] += __builtin_shuffle(v, vec{1, 0, 3, 2}) + multiply_low(keyed, keyed >> 32);
    }
  }

  void scramble() {
    constexpr uint64_t prime = 0x9e3779b1u;
    for (int i = 0; i < parts; ++i) {
      const vec v = part[i] ^ part[i] >> 47 ^ load(secrets.row[stripes_per_block] + i * width);
      part[i] = multiply_low(v, vec{} + prime) + (multiply_low(v >> 32, vec{} + prime) << 32);
    }
  }
};

uint64_t hash_chunk(const char* data, size_t size, uint64_t seed, uint64_t& second) {
  Sums sums;
  for (int i = 0; i < parts; ++i) sums.part[i] = load(secrets.row[0] + i * width) + seed;
  for (; size >= block_bytes; size -= block_bytes, data += block_bytes) {
    for (size_t row = 0; row < stripes_per_block; ++row) sums.mix(data + row * stripe, row);
    sums.scramble();
  }
  size_t row = 0;
  for (; size >= stripe; size -= stripe, data += stripe) sums.mix(data, row++);
  if (size > 0) {
    char rest[stripe] = {};
    std::memcpy(rest, data, size);
    sums.mix(rest, row);
  }
  sums.scramble();
  // Two different sums of products with odd secrets: any change of one lane changes both.
  uint64_t lane[lanes], first = seed;
  std::memcpy(lane, sums.part, sizeof lane);
  second = ~seed;
  for (int i = 0; i < lanes; ++i) {
    first += lane[i] * secrets.row[1][i];
    second += (lane[i] ^ lane[i] >> 32) * secrets.row[2][i];
  }
  second = scatter(second);
  return scatter(first);
}

}  // namespace

void content_hash(const void* data, size_t size, int threads, uint64_t (&hash)[2]) {
  const char* bytes = static_cast<const char*>(data);
  const int64_t chunks = static_cast<int64_t>((size + chunk_bytes - 1) / chunk_bytes);
  uint64_t first = scatter(size), second = ~first;
  if (chunks <= 1) {
    hash[0] = hash_chunk(bytes, size, first, hash[1]);
    return;
  }
  std::vector<uint64_t> partial(2 * chunks);
  const auto work = [&](int64_t c) {
    const size_t begin = c * chunk_bytes, length = std::min(chunk_bytes, size - begin);
    partial[2 * c] = hash_chunk(bytes + begin, length, scatter(c), partial[2 * c + 1]);
  };
  if (threads <= 1 || chunks < 4) {  // no parallel region at all: in a forked child even one of a single thread hangs
    for (int64_t c = 0; c < chunks; ++c) work(c);
  } else {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t c = 0; c < chunks; ++c) work(c);
  }
  for (int64_t c = 0; c < chunks; ++c) {
    first = scatter(first ^ partial[2 * c]);
    second = scatter(second + partial[2 * c + 1]);
  }
  hash[0] = first;
  hash[1] = second;
}

}  // namespace fuser
