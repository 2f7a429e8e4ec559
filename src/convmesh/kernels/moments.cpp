// Mean and variance of sets of numbers, each of which lie one behind the other.
//
// A piece of a set is read twice while it is in the first-level cache: for its mean, and for the squares of what is left
// without that. Pieces are then merged about their common mean, in their order. So memory is read once, nothing of a
// variance is lost beside a large mean, and threads do not change a bit.
#include <vector>

#include "vectors.h"

namespace {

constexpr Int PIECE_BYTES = 1 << 14;
constexpr Int WORTH_A_THREAD = 1 << 15;  // numbers

// The mean is `near + rest`: how far two means are apart would be lost beside themselves.
struct Moments {
    double count, near, rest, squares;  // of deviations from the mean, a sum

    void merge(const Moments &other) {
        const double total = count + other.count, apart = other.near - near + (other.rest - rest);
        rest += apart * other.count / total;
        squares += other.squares + apart * apart * (count * other.count / total);
        count = total;
    }
};

// The sum of what `f` makes of numbers, by the vector and one by one.
template <class T, class F> INLINE double sum_of(const T *from, Int count, const F &f) {
    constexpr Int L = LANES<T>, AT_ONCE = 4;
    Vector<T> sums[AT_ONCE] = {};
    Int at = 0;
    for (; at + AT_ONCE * L <= count; at += AT_ONCE * L)
        for (int i = 0; i < AT_ONCE; i++) sums[i] += f(load(from + at + i * L));
    double sum = 0;
    for (; at < count; at++) sum += f(from[at]);
    for (const Vector<T> &each : sums)
        for (Int lane = 0; lane < L; lane++) sum += each[lane];
    return sum;
}

template <class T> Moments moments_of(const T *from, Int count) {
    const T near = T(sum_of(from, count, [](auto x) { return x; }) / count);
    const double rest = sum_of(from, count, [near](auto x) { return x - near; });
    const double squares = sum_of(from, count, [near](auto x) { return (x - near) * (x - near); });
    const double about_mean = squares - rest * rest / count;
    return {double(count), double(near), rest / count, about_mean < 0 ? 0 : about_mean};  // what is no number stays so
}

template <class T> void moments(const T *x, Int sets, Int count, T *mean, T *variance, Int threads) {
    const Int pieces = (count * Int(sizeof(T)) + PIECE_BYTES - 1) / PIECE_BYTES;
    std::vector<Moments> found(sets * pieces);
    const Int useful = std::min(threads, 1 + sets * count / WORTH_A_THREAD);
#pragma omp parallel for num_threads(useful)
    for (Int number = 0; number < sets * pieces; number++) {
        const Int set = number / pieces, piece = number % pieces;
        const Int first = count * piece / pieces, last = count * (piece + 1) / pieces;
        found[number] = moments_of(x + set * count + first, last - first);
    }
    for (Int set = 0; set < sets; set++) {
        Moments whole = found[set * pieces];
        for (Int piece = 1; piece < pieces; piece++) whole.merge(found[set * pieces + piece]);
        mean[set] = T(whole.near + whole.rest), variance[set] = T(whole.squares / whole.count);
    }
}

}  // namespace

extern "C" void convmesh_moments_float32(const float *x, Int sets, Int count, float *mean, float *variance, Int threads) {
    moments(x, sets, count, mean, variance, threads);
}
extern "C" void convmesh_moments_float64(
    const double *x, Int sets, Int count, double *mean, double *variance, Int threads) {
    moments(x, sets, count, mean, variance, threads);
}
