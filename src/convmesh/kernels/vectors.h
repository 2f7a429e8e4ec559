// Vectors of the machine's width: reading, writing and transposing them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <type_traits>
#include <utility>

#ifdef __AVX__
#include <immintrin.h>
#endif

#define INLINE inline __attribute__((always_inline))
#define APART __attribute__((noinline))  // so that all registers are there for one loop

typedef int64_t Int;

#ifdef __AVX512F__
constexpr int VECTOR_BYTES = 64, TILE_ROWS = 12, NARROW_ROWS = 16;
#else
constexpr int VECTOR_BYTES = 32, TILE_ROWS = 6, NARROW_ROWS = 8;
#endif

template <class T> struct OfMachine {
    typedef std::conditional_t<sizeof(T) == 4, int32_t, int64_t> Integer;
    typedef T Vector __attribute__((vector_size(VECTOR_BYTES)));
    typedef Integer Bits __attribute__((vector_size(VECTOR_BYTES)));
};
template <class T> using Vector = typename OfMachine<T>::Vector;
template <class T> constexpr Int LANES = VECTOR_BYTES / sizeof(T);

template <class T> INLINE Vector<T> load(const T *from) {
    Vector<T> vector;
    std::memcpy(&vector, from, VECTOR_BYTES);
    return vector;
}

#if defined(__AVX512F__)
INLINE __mmask16 first_lanes(Int count) { return (1u << count) - 1; }
#elif defined(__AVX2__)
INLINE __m256i first_lanes(Int count) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
#endif

// The first `count` lanes, and zeros; of memory no more than these is touched.
template <class T> INLINE Vector<T> load_some(const T *from, Int count) {
#if defined(__AVX512F__)
    if constexpr (sizeof(T) == 4)
        return (Vector<T>)_mm512_maskz_loadu_ps(first_lanes(count), from);
    else
        return (Vector<T>)_mm512_maskz_loadu_pd(first_lanes(count), from);
#elif defined(__AVX2__)
    return (Vector<T>)_mm256_maskload_ps((const float *)from, first_lanes(count * sizeof(T) / 4));
#else
    Vector<T> vector{};
    for (Int i = 0; i < count; i++) vector[i] = from[i];
    return vector;
#endif
}

template <class T> INLINE void store(T *to, Vector<T> vector) { std::memcpy(to, &vector, VECTOR_BYTES); }

template <class T> INLINE void store_some(T *to, Vector<T> vector, Int count) {
#if defined(__AVX512F__)
    if constexpr (sizeof(T) == 4)
        _mm512_mask_storeu_ps(to, first_lanes(count), (__m512)vector);
    else
        _mm512_mask_storeu_pd(to, first_lanes(count), (__m512d)vector);
#elif defined(__AVX2__)
    _mm256_maskstore_ps((float *)to, first_lanes(count * sizeof(T) / 4), (__m256)vector);
#else
    for (Int i = 0; i < count; i++) to[i] = vector[i];
#endif
}

// To where a vector may begin, without reading memory into caches that it would leave again before it is asked for.
template <class T> INLINE void store_past_caches(T *to, Vector<T> vector) {
#if defined(__AVX512F__)
    _mm512_stream_si512((__m512i *)to, (__m512i)vector);
#elif defined(__AVX__)
    _mm256_stream_si256((__m256i *)to, (__m256i)vector);
#else
    store(to, vector);
#endif
}

// What a thread has written past the caches is there for others after this.
INLINE void finish_writing() {
#ifdef __AVX__
    _mm_sfence();
#endif
}

template <class T> INLINE bool may_begin(const T *vector) { return uintptr_t(vector) % VECTOR_BYTES == 0; }

// Memory that begins where a line of the cache does, so that its vectors do not straddle two of them.
template <class T> class Buffer {
  public:
    T *reserve(Int count) {
        if (count > size) memory.reset(new (LINE) T[count]), size = count;
        return memory.get();
    }
    T *get() const { return memory.get(); }

  private:
    static constexpr std::align_val_t LINE{64};
    struct Free {
        void operator()(T *numbers) const { operator delete[](numbers, LINE); }
    };
    std::unique_ptr<T[], Free> memory;
    Int size = 0;
};

// Short lines, for which calling a library would take longer than copying.
template <class T> INLINE void copy(T *to, const T *from, Int count) {
    constexpr Int L = LANES<T>;
    if (count < L) return store_some(to, load_some(from, count), count);
    for (Int i = 0; i + L < count; i += L) store(to + i, load(from + i));
    store(to + count - L, load(from + count - L));
}

// Lanes of two vectors, the second one's counted behind the first one's. GCC has the function of clang's from 12 on.
template <class T, Int... LANE> INLINE Vector<T> pick(Vector<T> first, Vector<T> second) {
#if defined(__clang__) || __GNUC__ >= 12
    return __builtin_shufflevector(first, second, LANE...);
#else
    return __builtin_shuffle(first, second, typename OfMachine<T>::Bits{LANE...});
#endif
}

// Swaps the upper right and the lower left of the square blocks of size S that two rows of a matrix are made of.
template <class T, int S, Int... I>
INLINE void swap_blocks(Vector<T> &upper, Vector<T> &lower, std::integer_sequence<Int, I...>) {
    constexpr Int L = LANES<T>;
    const Vector<T> both = pick<T, ((I & S) ? I - S + L : I)...>(upper, lower);
    lower = pick<T, ((I & S) ? I + L : I + S)...>(upper, lower);
    upper = both;
}

// A square of as many vectors as these have lanes.
template <class T, int S = LANES<T> / 2> INLINE void transpose(Vector<T> *square) {
    constexpr Int L = LANES<T>;
#pragma GCC unroll 16
    for (int i = 0; i < L; i++)
        if (!(i & S)) swap_blocks<T, S>(square[i], square[i + S], std::make_integer_sequence<Int, L>());
    if constexpr (S > 1) transpose<T, S / 2>(square);
}

// to[i][j] = column j of `from`, which begins at `offsets[j]`, number i: for `rows` rows of `to`, each of `width` numbers,
// `columns` that are there, and zeros. Behind rows that are no whole vectors there is room for one.
template <class T>
INLINE void transpose_into(T *to, Int rows, Int width, const T *from, const Int *offsets, Int columns) {
    constexpr Int L = LANES<T>;
    const bool few = rows < L;
    if ((width > L && width % L) || (few && rows < L / 4)) {
        for (Int row = 0; row < rows; row++, to += width) {
            for (Int column = 0; column < columns; column++) to[column] = from[offsets[column] + row];
            for (Int column = columns; column < width; column++) to[column] = T(0);
        }
        return;
    }
    for (Int next = 0; next < rows; next += L)
        for (Int first = 0; first < width; first += L) {
            const Int row = few ? 0 : std::min(next, rows - L);  // some rows twice rather than one by one
            Vector<T> square[L];
            if (few || first + L > columns) {
                for (int i = 0; i < L; i++)
                    square[i] = first + i < columns ? load_some(from + offsets[first + i] + row, std::min(rows, L))
                                                    : Vector<T>{};
                transpose<T>(square);
                for (int i = 0; i < std::min(rows, L); i++) store(to + (row + i) * width + first, square[i]);
                continue;
            }
#pragma GCC unroll 16
            for (int i = 0; i < L; i++) square[i] = load(from + offsets[first + i] + row);
            transpose<T>(square);
#pragma GCC unroll 16
            for (int i = 0; i < L; i++) store(to + (row + i) * width + first, square[i]);
        }
}
