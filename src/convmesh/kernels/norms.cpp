// What a norm and its gradient are made of, where the numbers of a set lie one behind the other: moments, the sums of
// backward, and the linear function of a set that applies them. Memory is read once for each.
#include <vector>

#include "runs.h"
#include "threads.h"

namespace {

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

// A piece is read twice while it is in the cache: for its mean, and for the squares of what is left without that. So
// nothing of a variance is lost beside a large mean.
template <class T> Moments moments_of(const T *from, Int count) {
    const Sums plain = sums_of<T>(count, [=](auto read) { return Both<decltype(read(from))>{read(from), {}}; });
    const T near = T(plain.first / count);
    const Sums sums = sums_of<T>(count, [=](auto read) {
        const auto apart = read(from) - near;
        return Both<decltype(read(from))>{apart, apart * apart};
    });
    const double squares = sums.second - sums.first * sums.first / count;
    return {double(count), double(near), sums.first / count, squares < 0 ? 0 : squares};  // what is no number stays so
}

// Pieces are merged about their common mean, in their order: threads do not change a bit.
template <class T> void moments(const T *x, Int sets, Int count, T *mean, T *variance, Int threads) {
    const Pieces pieces = Pieces::of<T>(sets, count);
    std::vector<Moments> found(pieces.number());
    share(pieces.number(), pieces.useful(threads), [&](Int piece) {
        found[piece] = moments_of(x + pieces.first(piece), pieces.size(piece));
    });
    for (Int set = 0; set < sets; set++) {
        Moments whole = found[set * pieces.of_set];
        for (Int piece = 1; piece < pieces.of_set; piece++) whole.merge(found[set * pieces.of_set + piece]);
        mean[set] = T(whole.near + whole.rest), variance[set] = T(whole.squares / whole.count);
    }
}

// Of the gradient, and of the gradient times the normalised input.
template <class T>
void sums(const T *gradient, const T *x, Int sets, Int count, const T *mean, const T *rstd, T *plain, T *products,
          Int threads) {
    const Pieces pieces = Pieces::of<T>(sets, count);
    std::vector<Sums> found(pieces.number());
    share(pieces.number(), pieces.useful(threads), [&](Int piece) {
        const T *g = gradient + pieces.first(piece), *from = x + pieces.first(piece), near = mean[pieces.set(piece)];
        found[piece] = sums_of<T>(pieces.size(piece), [=](auto read) {
            return Both<decltype(read(g))>{read(g), read(g) * (read(from) - near)};
        });
    });
    for (Int set = 0; set < sets; set++) {
        Sums whole{0, 0};
        for (Int piece = set * pieces.of_set; piece < (set + 1) * pieces.of_set; piece++)
            whole.first += found[piece].first, whole.second += found[piece].second;
        plain[set] = T(whole.first), products[set] = T(whole.second * rstd[set]);
    }
}

// Coefficients of a set, of which there are as many as means.
template <class T> struct Linear {
    const T *mean, *by_input, *by_gradient, *added;
};

// to = (x - mean) * by_input + gradient * by_gradient + added, or without a gradient. Sets take turns with numbers.
template <class T>
void combine(const T *x, const T *gradient, Int sets, Int count, Linear<T> linear, Int means, T *to, Int threads) {
    const Pieces pieces = Pieces::of<T>(sets, count);
    const bool past_caches = sets * count * Int(sizeof(T)) >= PAST_CACHES;
    share(pieces.number(), pieces.useful(threads), [&](Int piece) {
        const Int set = pieces.set(piece) % means, at = pieces.first(piece), size = pieces.size(piece);
        const T *from = x + at, *g = gradient + at, mean = linear.mean[set], by = linear.by_input[set];
        const T added = linear.added[set], by_gradient = gradient ? linear.by_gradient[set] : T(0);
        if (gradient)
            fill<T>(to + at, size, past_caches, [=](auto read) {
                return (read(from) - mean) * by + read(g) * by_gradient + added;
            });
        else
            fill<T>(to + at, size, past_caches, [=](auto read) { return (read(from) - mean) * by + added; });
    });
}

}  // namespace

#define FOR_NUMBERS(T, NAME)                                                                                           \
    extern "C" void convmesh_moments_##NAME(const T *x, Int sets, Int count, T *mean, T *variance, Int threads) {      \
        moments(x, sets, count, mean, variance, threads);                                                              \
    }                                                                                                                  \
    extern "C" void convmesh_sums_##NAME(                                                                              \
        const T *gradient, const T *x, Int sets, Int count, const T *mean, const T *rstd, T *plain, T *products,       \
        Int threads) {                                                                                                 \
        sums(gradient, x, sets, count, mean, rstd, plain, products, threads);                                          \
    }                                                                                                                  \
    extern "C" void convmesh_combine_##NAME(                                                                           \
        const T *x, const T *gradient, Int sets, Int count, Int means, const T *mean, const T *by_input,               \
        const T *by_gradient, const T *added, T *to, Int threads) {                                                    \
        combine(x, gradient, sets, count, Linear<T>{mean, by_input, by_gradient, added}, means, to, threads);          \
    }
FOR_NUMBERS(float, float32)
FOR_NUMBERS(double, float64)
