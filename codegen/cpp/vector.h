// Vectors of float or double by the compiler's vector extensions: loads, stores, conversions and functions.
// FUSER_REAL (float or double) is the arithmetic type, FUSER_VECTOR_BYTES the size of a vector: 16, 32 (AVX2) or 64
// (AVX-512). Functions give NaN for NaN, but sign_of 0, as eager's do.
#pragma once
#include <cstdint>
#include <limits>
#if FUSER_VECTOR_BYTES < 32
#include <cmath>
#endif

namespace fuser {

constexpr int vector_bytes = FUSER_VECTOR_BYTES;

using real = FUSER_REAL;
constexpr int width = vector_bytes / static_cast<int>(sizeof(real));

template <int N> struct signed_of;
template <> struct signed_of<4> { using type = int32_t; };
template <> struct signed_of<8> { using type = int64_t; };
using lane_int = signed_of<sizeof(real)>::type;

typedef real vec __attribute__((vector_size(vector_bytes)));
typedef lane_int mask __attribute__((vector_size(vector_bytes)));  // all bits set where true

struct bfloat16 { uint16_t bits; };
struct half { uint16_t bits; };

#define FUSER_INLINE static inline __attribute__((always_inline))

// Scalars of the storage types, to and from the arithmetic type.

FUSER_INLINE float float_of_bits(uint32_t bits) { float f; __builtin_memcpy(&f, &bits, 4); return f; }
FUSER_INLINE uint32_t bits_of_float(float f) { uint32_t bits; __builtin_memcpy(&bits, &f, 4); return bits; }

FUSER_INLINE real to_real(float x) { return static_cast<real>(x); }
FUSER_INLINE real to_real(double x) { return static_cast<real>(x); }
FUSER_INLINE real to_real(bfloat16 x) { return float_of_bits(static_cast<uint32_t>(x.bits) << 16); }

FUSER_INLINE real to_real(half x) {
  const uint32_t sign = (x.bits & 0x8000u) << 16, magnitude = x.bits & 0x7fffu;
  if (magnitude >= 0x7c00u) return float_of_bits(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
  // Halves count in steps of 2^-24 near zero; the multiplication is exact for normal and subnormal ones alike.
  return float_of_bits(sign | bits_of_float(float_of_bits(magnitude << 13) * 0x1p112f));
}

template <class T> FUSER_INLINE T from_real(real x);
template <> inline float from_real<float>(real x) { return static_cast<float>(x); }
template <> inline double from_real<double>(real x) { return static_cast<double>(x); }

template <> inline bfloat16 from_real<bfloat16>(real x) {
  const uint32_t bits = bits_of_float(static_cast<float>(x));
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {0x7fc0};
  return {static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16)};
}

template <> inline half from_real<half>(real x) {
  const uint32_t bits = bits_of_float(static_cast<float>(x));
  const uint32_t sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return {static_cast<uint16_t>(sign | 0x7e00u)};
  if (magnitude >= 0x477ff000u) return {static_cast<uint16_t>(sign | 0x7c00u)};  // rounds to 2^16 or is infinite
  if (magnitude < 0x38800000u) {  // subnormal as a half: let float addition round at 2^-24
    const uint32_t rounded = bits_of_float(float_of_bits(magnitude) + 0.5f) - bits_of_float(0.5f);
    return {static_cast<uint16_t>(sign | rounded)};
  }
  const uint32_t rounded = magnitude + 0xfffu + (magnitude >> 13 & 1u);
  return {static_cast<uint16_t>(sign | (rounded - 0x38000000u) >> 13)};
}

// Calls work(0) ... work(tasks - 1), by `threads` threads when there are several: a parallel region of one thread costs
// more than a small kernel does.
template <class Work> FUSER_INLINE void share(int64_t tasks, int threads, const Work& work) {
  if (threads <= 1) {
    for (int64_t task = 0; task < tasks; ++task) work(task);
    return;
  }
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t task = 0; task < tasks; ++task) work(task);
}

// Loads: whole vectors, the first n lanes (the others are 0), or lanes a stride apart.

FUSER_INLINE vec load(const real* p) { vec v; __builtin_memcpy(&v, p, sizeof v); return v; }

template <class T> FUSER_INLINE vec load(const T* p) {
  vec v;
  for (int i = 0; i < width; ++i) v[i] = to_real(p[i]);
  return v;
}

// Compiler built-ins rather than <immintrin.h>, which takes longer to parse than a kernel to compile.
#if FUSER_VECTOR_BYTES == 32
typedef int32_t int_lanes __attribute__((vector_size(32)));
typedef long long long_lanes __attribute__((vector_size(32)));
FUSER_INLINE int_lanes first_lanes(int n) {
  static const int32_t window[16] = {-1, -1, -1, -1, -1, -1, -1, -1};
  int_lanes lanes;
  __builtin_memcpy(&lanes, window + 8 - n, sizeof lanes);
  return lanes;
}
typedef float float_lanes __attribute__((vector_size(32)));
typedef double double_lanes __attribute__((vector_size(32)));
FUSER_INLINE float_lanes load_lanes(const float* p, int n) {
  return __builtin_ia32_maskloadps256((const float_lanes*)p, first_lanes(n));
}
FUSER_INLINE double_lanes load_lanes(const double* p, int n) {
  return __builtin_ia32_maskloadpd256((const double_lanes*)p, (long_lanes)first_lanes(2 * n));
}
FUSER_INLINE vec load_partial(const real* p, int n) { return load_lanes(p, n); }
#else
FUSER_INLINE vec load_partial(const real* p, int n) {
  vec v{};
  __builtin_memcpy(&v, p, n * sizeof(real));
  return v;
}
#endif

template <class T> FUSER_INLINE vec load_partial(const T* p, int n) {
  alignas(64) real lanes[width] = {};
  for (int i = 0; i < n; ++i) lanes[i] = to_real(p[i]);
  return load(lanes);
}

template <class T> FUSER_INLINE vec load_strided(const T* p, int64_t stride, int n) {
  alignas(64) real lanes[width] = {};
  if (n == width) {
    for (int i = 0; i < width; ++i) lanes[i] = to_real(p[i * stride]);
  } else {
    for (int i = 0; i < n; ++i) lanes[i] = to_real(p[i * stride]);
  }
  return load(lanes);
}

template <class T> FUSER_INLINE vec broadcast(T x) { return vec{} + to_real(x); }
FUSER_INLINE vec broadcast(real x) {
  vec v;
  for (int i = 0; i < width; ++i) v[i] = x;
  return v;
}
FUSER_INLINE mask broadcast(bool x) { return mask{} - static_cast<lane_int>(x); }

FUSER_INLINE mask load_strided(const bool* p, int64_t stride, int n) {
  mask m{};
  for (int i = 0; i < n; ++i) m[i] = -static_cast<lane_int>(p[i * stride]);
  return m;
}
FUSER_INLINE mask load(const bool* p) { return load_strided(p, 1, width); }
FUSER_INLINE mask load_partial(const bool* p, int n) { return load_strided(p, 1, n); }

// Stores, likewise.

FUSER_INLINE void store(real* p, vec v) { __builtin_memcpy(p, &v, sizeof v); }

template <class T> FUSER_INLINE void store(T* p, vec v) {
  for (int i = 0; i < width; ++i) p[i] = from_real<T>(v[i]);
}

#if FUSER_VECTOR_BYTES == 32
// Halves, quarters and a single lane: far cheaper than a masked store on some CPUs.
typedef float four_floats __attribute__((vector_size(16)));
typedef float two_floats __attribute__((vector_size(8)));
typedef double two_doubles __attribute__((vector_size(16)));
FUSER_INLINE void store_lanes(float* p, float_lanes v, int n) {
  four_floats low = __builtin_shufflevector(v, v, 0, 1, 2, 3);
  if (n & 4) {
    __builtin_memcpy(p, &low, 16);
    low = __builtin_shufflevector(v, v, 4, 5, 6, 7), p += 4;
  }
  if (n & 2) {
    const two_floats pair = __builtin_shufflevector(low, low, 0, 1);
    __builtin_memcpy(p, &pair, 8);
    low = __builtin_shufflevector(low, low, 2, 3, 2, 3), p += 2;
  }
  if (n & 1) *p = low[0];
}
FUSER_INLINE void store_lanes(double* p, double_lanes v, int n) {
  two_doubles low = __builtin_shufflevector(v, v, 0, 1);
  if (n & 2) {
    __builtin_memcpy(p, &low, 16);
    low = __builtin_shufflevector(v, v, 2, 3), p += 2;
  }
  if (n & 1) *p = low[0];
}
FUSER_INLINE void store_partial(real* p, vec v, int n) { store_lanes(p, v, n); }
#else
FUSER_INLINE void store_partial(real* p, vec v, int n) { __builtin_memcpy(p, &v, n * sizeof(real)); }
#endif

template <class T> FUSER_INLINE void store_strided(T* p, int64_t stride, vec v, int n) {
  alignas(64) real lanes[width];
  store(lanes, v);
  for (int i = 0; i < n; ++i) p[i * stride] = from_real<T>(lanes[i]);
}
template <class T> FUSER_INLINE void store_partial(T* p, vec v, int n) { store_strided(p, 1, v, n); }

FUSER_INLINE void store_strided(bool* p, int64_t stride, mask m, int n) {
  for (int i = 0; i < n; ++i) p[i * stride] = m[i] != 0;
}
FUSER_INLINE void store(bool* p, mask m) { store_strided(p, 1, m, width); }
FUSER_INLINE void store_partial(bool* p, mask m, int n) { store_strided(p, 1, m, n); }

// Arithmetic that eager defines its own way.

FUSER_INLINE vec select(mask m, vec a, vec b) { return m ? a : b; }
FUSER_INLINE vec real_of_mask(mask m) { return m ? broadcast(real(1)) : vec{}; }
FUSER_INLINE mask is_nan(vec a) { return a != a; }

// NaN in either operand wins; of equal operands (0 and -0) the first, as the hardware instruction in eager's kernels.
FUSER_INLINE vec maximum(vec a, vec b) { return a > b || is_nan(a) ? a : b; }
FUSER_INLINE vec minimum(vec a, vec b) { return a < b || is_nan(a) ? a : b; }

// The compiler's built-in of that name for the arithmetic type, inline where the CPU has an instruction.
#define FUSER_BUILTIN(name) [](real a, auto... b) { return sizeof(real) == 4 ? real(__builtin_##name##f(a, b...)) : real(__builtin_##name(a, b...)); }
#define FUSER_EACH(name, expression)                        \
  FUSER_INLINE vec name(vec x) {                            \
    vec y;                                                  \
    for (int i = 0; i < width; ++i) y[i] = expression;      \
    return y;                                               \
  }
FUSER_EACH(absolute, FUSER_BUILTIN(fabs)(x[i]))
FUSER_EACH(square_root, FUSER_BUILTIN(sqrt)(x[i]))
FUSER_EACH(floor, FUSER_BUILTIN(floor)(x[i]))
FUSER_EACH(ceiling, FUSER_BUILTIN(ceil)(x[i]))
FUSER_EACH(truncate, FUSER_BUILTIN(trunc)(x[i]))
FUSER_EACH(round_to_even, FUSER_BUILTIN(nearbyint)(x[i]))
FUSER_EACH(round_to_bfloat16, to_real(from_real<bfloat16>(x[i])))
FUSER_EACH(round_to_half, to_real(from_real<half>(x[i])))
#undef FUSER_EACH

FUSER_INLINE vec copy_sign(vec magnitude, vec sign) {
  const mask top = mask{} + std::numeric_limits<lane_int>::min();
  return (vec)(((mask)magnitude & ~top) | ((mask)sign & top));
}
FUSER_INLINE vec sign_of(vec x) { return is_nan(x) ? vec{} : (x > 0 ? broadcast(real(1)) : (x < 0 ? broadcast(real(-1)) : vec{})); }

// Elementary functions: SLEEF's, which libtorch_cpu exports.
#if FUSER_VECTOR_BYTES == 64
#define FUSER_SLEEF_F(name, precision) Sleef_##name##f16_##precision##avx512f
#define FUSER_SLEEF_D(name, precision) Sleef_##name##d8_##precision##avx512f
#elif FUSER_VECTOR_BYTES == 32
#define FUSER_SLEEF_F(name, precision) Sleef_##name##f8_##precision##avx2
#define FUSER_SLEEF_D(name, precision) Sleef_##name##d4_##precision##avx2
#endif

#if FUSER_VECTOR_BYTES >= 32
typedef float sleef_float __attribute__((vector_size(vector_bytes)));
typedef double sleef_double __attribute__((vector_size(vector_bytes)));
#define FUSER_UNARY(ours, name, precision)                                     \
  extern "C" sleef_float FUSER_SLEEF_F(name, precision)(sleef_float);          \
  extern "C" sleef_double FUSER_SLEEF_D(name, precision)(sleef_double);        \
  FUSER_INLINE sleef_float ours(sleef_float x) { return FUSER_SLEEF_F(name, precision)(x); } \
  FUSER_INLINE sleef_double ours(sleef_double x) { return FUSER_SLEEF_D(name, precision)(x); }
#define FUSER_BINARY(ours, name, precision)                                                   \
  extern "C" sleef_float FUSER_SLEEF_F(name, precision)(sleef_float, sleef_float);            \
  extern "C" sleef_double FUSER_SLEEF_D(name, precision)(sleef_double, sleef_double);         \
  FUSER_INLINE sleef_float ours(sleef_float x, sleef_float y) { return FUSER_SLEEF_F(name, precision)(x, y); } \
  FUSER_INLINE sleef_double ours(sleef_double x, sleef_double y) { return FUSER_SLEEF_D(name, precision)(x, y); }
#else
#define FUSER_UNARY(ours, name, precision)                         \
  FUSER_INLINE vec ours(vec x) {                                   \
    for (int i = 0; i < width; ++i) x[i] = std::name(x[i]);        \
    return x;                                                      \
  }
#define FUSER_BINARY(ours, name, precision)                        \
  FUSER_INLINE vec ours(vec x, vec y) {                            \
    for (int i = 0; i < width; ++i) x[i] = std::name(x[i], y[i]);  \
    return x;                                                      \
  }
#endif

FUSER_UNARY(exponential, exp, u10)
FUSER_UNARY(exponential2, exp2, u10)
FUSER_UNARY(expm1_of, expm1, u10)
FUSER_UNARY(logarithm, log, u10)
FUSER_UNARY(logarithm2, log2, u10)
FUSER_UNARY(logarithm10, log10, u10)
FUSER_UNARY(log1p_of, log1p, u10)
FUSER_UNARY(sine, sin, u10)
FUSER_UNARY(cosine, cos, u10)
FUSER_UNARY(tangent, tan, u10)
FUSER_UNARY(arcsine, asin, u10)
FUSER_UNARY(arccosine, acos, u10)
FUSER_UNARY(arctangent, atan, u10)
FUSER_UNARY(hyperbolic_sine, sinh, u10)
FUSER_UNARY(hyperbolic_cosine, cosh, u10)
FUSER_UNARY(hyperbolic_tangent, tanh, u10)
FUSER_UNARY(area_sine_below, asinh, u10)
FUSER_UNARY(area_cosine_below, acosh, u10)
FUSER_UNARY(area_tangent, atanh, u10)
FUSER_UNARY(error_function, erf, u10)
FUSER_UNARY(complementary_error_function, erfc, u15)
FUSER_BINARY(power, pow, u10)
FUSER_BINARY(arctangent2, atan2, u10)
FUSER_BINARY(hypotenuse, hypot, u05)

// SLEEF's asinh and acosh overflow where x^2 does; eager calls the C library's, which do not.
constexpr real area_limit = sizeof(real) == 4 ? real(1e18) : real(1e150);
FUSER_INLINE vec area_of_large(vec x) { return logarithm(x) + real(0.693147180559945309417232121458); }  // log(2 x)
FUSER_INLINE vec area_sine(vec x) {
  const vec magnitude = absolute(x);
  return select(magnitude > area_limit, copy_sign(area_of_large(magnitude), x), area_sine_below(x));
}
FUSER_INLINE vec area_cosine(vec x) { return select(x > area_limit, area_of_large(x), area_cosine_below(x)); }

FUSER_INLINE vec sigmoid_of(vec x) { return real(1) / (real(1) + exponential(-x)); }
FUSER_INLINE mask is_infinite(vec x) { return absolute(x) == broadcast(std::numeric_limits<real>::infinity()); }
FUSER_INLINE mask is_finite(vec x) { return absolute(x) < broadcast(std::numeric_limits<real>::infinity()); }

FUSER_INLINE vec remainder_of_division(vec x, vec y) {
  vec r;
  for (int i = 0; i < width; ++i) r[i] = FUSER_BUILTIN(fmod)(x[i], y[i]);
  return r;
}

}  // namespace fuser
