// What a norm and its gradient are made of, where the numbers of a set lie one behind the other: moments, the sums of
// backward, and the linear function of a set that applies them. Memory is read once for each.
#include <cmath>
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

// What `f(piece)` makes of every piece of `samples` times `sets` parts of memory is given to `add(set, what)`: that of a
// set in the order of its pieces, so that threads do not change a bit.
template <class T, class Found, class F, class Add>
void by_set(Int samples, Int sets, Int count, Int threads, const F &f, const Add &add) {
    const Pieces pieces = Pieces::of<T>(samples * sets, count);
    std::vector<Found> found(pieces.number());
    share(pieces.number(), pieces.useful(threads), [&](Int piece) {
        found[piece] = f(pieces.set(piece) % sets, pieces.first(piece), pieces.size(piece));
    });
    for (Int part = 0; part < samples * sets; part++)
        for (Int piece = 0; piece < pieces.of_set; piece++) add(part % sets, found[part * pieces.of_set + piece]);
}

// A set has a part in every sample. Pieces are merged about their common mean.
template <class T>
void moments(const T *x, Int samples, Int sets, Int count, T *mean, T *variance, Int threads) {
    std::vector<Moments> whole(sets, Moments{0, 0, 0, 0});
    by_set<T, Moments>(
        samples, sets, count, threads,
        [=](Int, Int first, Int size) { return moments_of(x + first, size); },
        [&](Int set, const Moments &found) { whole[set].count ? whole[set].merge(found) : void(whole[set] = found); });
    for (Int set = 0; set < sets; set++)
        mean[set] = T(whole[set].near + whole[set].rest), variance[set] = T(whole[set].squares / whole[set].count);
}

// Of the gradient, and of the gradient times the normalised input.
template <class T>
void sums(const T *gradient, const T *x, Int samples, Int sets, Int count, const T *mean, const T *rstd, T *plain,
          T *products, Int threads) {
    std::vector<Sums> whole(sets, Sums{0, 0});
    by_set<T, Sums>(
        samples, sets, count, threads,
        [=](Int set, Int first, Int size) {
            const T *g = gradient + first, *from = x + first, near = mean[set];
            return sums_of<T>(size, [=](auto read) {
                return Both<decltype(read(g))>{read(g), read(g) * (read(from) - near)};
            });
        },
        [&](Int set, const Sums &found) { whole[set].first += found.first, whole[set].second += found.second; });
    for (Int set = 0; set < sets; set++)
        plain[set] = T(whole[set].first), products[set] = T(whole[set].second * rstd[set]);
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

// Batch norm of one rank's samples by the moments of all ranks, [rank 2 set]. These are merged about the common mean;
// running statistics, if there are any, are moved towards them; mean and reciprocal deviation are left in `saved`.
template <class T> struct BatchNorm {
    const T *moments, *weight, *bias;
    const double *shares;  // of the values, by rank
    Int ranks;
    double eps, momentum, correction;
    T *running_mean, *running_var, *saved;
};

template <class T>
void batch_norm(const T *x, Int samples, Int sets, Int count, const BatchNorm<T> &norm, T *to, Int threads) {
    std::vector<T> scale(sets), shift(sets);
    for (Int set = 0; set < sets; set++) {
        double mean = 0, variance = 0;
        for (Int rank = 0; rank < norm.ranks; rank++) mean += norm.shares[rank] * norm.moments[rank * 2 * sets + set];
        for (Int rank = 0; rank < norm.ranks; rank++) {
            const T *own = norm.moments + rank * 2 * sets + set;
            const double apart = own[0] - mean;
            variance += norm.shares[rank] * (own[sets] + apart * apart);
        }
        const double rstd = 1 / std::sqrt(variance + norm.eps), kept = 1 - norm.momentum;
        if (norm.running_mean) norm.running_mean[set] = T(kept * norm.running_mean[set] + norm.momentum * mean);
        if (norm.running_var)
            norm.running_var[set] = T(kept * norm.running_var[set] + norm.momentum * norm.correction * variance);
        norm.saved[set] = T(mean), norm.saved[sets + set] = T(rstd);
        scale[set] = T(norm.weight ? rstd * norm.weight[set] : rstd), shift[set] = norm.bias ? norm.bias[set] : T(0);
    }
    if (!samples || !count) return;
    combine<T>(x, nullptr, samples * sets, count, {norm.saved, scale.data(), nullptr, shift.data()}, sets, to, threads);
}

// The gradient of its input by the sums over all ranks, [2 set]: of gradient times normalised input, and of gradient.
template <class T>
void batch_norm_backward(const T *gradient, const T *x, Int samples, Int sets, Int count, const T *mean, const T *rstd,
                         const T *weight, const T *sums, double values, T *to, Int threads) {
    std::vector<T> by_input(sets), by_gradient(sets), added(sets);
    for (Int set = 0; set < sets; set++) {
        const double scale = double(rstd[set]) * (weight ? weight[set] : T(1));
        by_gradient[set] = T(scale), added[set] = T(-scale * sums[sets + set] / values);
        by_input[set] = T(-scale * rstd[set] * sums[set] / values);
    }
    if (!samples || !count) return;
    combine<T>(x, gradient, samples * sets, count, {mean, by_input.data(), by_gradient.data(), added.data()}, sets, to,
               threads);
}

}  // namespace

#define FOR_NUMBERS(T, NAME)                                                                                           \
    extern "C" void convmesh_moments_##NAME(                                                                           \
        const T *x, Int samples, Int sets, Int count, T *mean, T *variance, Int threads) {                             \
        moments(x, samples, sets, count, mean, variance, threads);                                                     \
    }                                                                                                                  \
    extern "C" void convmesh_sums_##NAME(                                                                              \
        const T *gradient, const T *x, Int samples, Int sets, Int count, const T *mean, const T *rstd, T *plain,       \
        T *products, Int threads) {                                                                                    \
        sums(gradient, x, samples, sets, count, mean, rstd, plain, products, threads);                                 \
    }                                                                                                                  \
    extern "C" void convmesh_combine_##NAME(                                                                           \
        const T *x, const T *gradient, Int sets, Int count, Int means, const T *mean, const T *by_input,               \
        const T *by_gradient, const T *added, T *to, Int threads) {                                                    \
        combine(x, gradient, sets, count, Linear<T>{mean, by_input, by_gradient, added}, means, to, threads);          \
    }                                                                                                                  \
    extern "C" void convmesh_batch_norm_##NAME(                                                                        \
        const T *x, Int samples, Int sets, Int count, const T *moments, const double *shares, Int ranks, double eps,   \
        const T *weight, const T *bias, T *running_mean, T *running_var, double momentum, double correction, T *saved, \
        T *to, Int threads) {                                                                                          \
        const BatchNorm<T> norm{moments, weight,   bias,       shares,       ranks,      eps,                          \
                                momentum, correction, running_mean, running_var, saved};                               \
        batch_norm(x, samples, sets, count, norm, to, threads);                                                        \
    }                                                                                                                  \
    extern "C" void convmesh_batch_norm_backward_##NAME(                                                               \
        const T *gradient, const T *x, Int samples, Int sets, Int count, const T *mean, const T *rstd,                 \
        const T *weight, const T *sums, double values, T *to, Int threads) {                                           \
        batch_norm_backward(gradient, x, samples, sets, count, mean, rstd, weight, sums, values, to, threads);         \
    }
FOR_NUMBERS(float, float32)
FOR_NUMBERS(double, float64)
