// Numbers that lie one behind the other: sums over them, and writing them.
#pragma once

#include "vectors.h"

// So much of everything that is read stays in the first-level cache while it is read twice. Vectors add up no more than
// this in their own type, and the rest is done in double precision.
constexpr Int PIECE_BYTES = 1 << 14;

constexpr Int WORTH_A_THREAD = 1 << 15;  // numbers

// Sets of as many numbers each, in pieces of about one size.
struct Pieces {
    Int sets, count, of_set;

    template <class T> static Pieces of(Int sets, Int count) {
        return {sets, count, std::max<Int>(1, (count * Int(sizeof(T)) + PIECE_BYTES - 1) / PIECE_BYTES)};
    }
    Int number() const { return sets * of_set; }
    Int set(Int piece) const { return piece / of_set; }
    Int first(Int piece) const { return set(piece) * count + count * (piece % of_set) / of_set; }
    Int size(Int piece) const { return count * (piece % of_set + 1) / of_set - count * (piece % of_set) / of_set; }
    Int useful(Int threads) const { return std::min(threads, 1 + sets * count / WORTH_A_THREAD); }
};

struct Sums {
    double first, second;
};

template <class N> struct Both {
    N first, second;
};

// The sums of two values that `f` makes of the numbers at each place. It gets a function that reads them: a vector's
// worth side by side, or one.
template <class T, class F> INLINE Sums sums_of(Int count, const F &f) {
    constexpr Int L = LANES<T>, AT_ONCE = 4;
    Vector<T> first[AT_ONCE] = {}, second[AT_ONCE] = {};
    Int at = 0;
    for (; at + AT_ONCE * L <= count; at += AT_ONCE * L)
        for (int i = 0; i < AT_ONCE; i++) {
            const auto both = f([at, i](const T *from) { return load(from + at + i * L); });
            first[i] += both.first, second[i] += both.second;
        }
    Sums sums{0, 0};
    for (; at < count; at++) {
        const auto both = f([at](const T *from) { return from[at]; });
        sums.first += both.first, sums.second += both.second;
    }
    for (int i = 0; i < AT_ONCE; i++)
        for (Int lane = 0; lane < L; lane++) sums.first += first[i][lane], sums.second += second[i][lane];
    return sums;
}

// A result this large is written past the caches: memory would be read into them first, only to be overwritten, and
// most of the result would have left them before anybody asked for it.
constexpr Int PAST_CACHES = 12 << 20;

// What `f` makes of the numbers at each place, as for sums.
template <class T, class F> INLINE void fill(T *to, Int count, bool past_caches, const F &f) {
    constexpr Int L = LANES<T>;
    Int at = 0;
    const auto one = [&] { to[at] = f([at](const T *from) { return from[at]; }), at++; };
    const auto many = [&] { return f([at](const T *from) { return load(from + at); }); };
    if (past_caches) {
        while (at < count && !may_begin(to + at)) one();
        for (; at + L <= count; at += L) store_past_caches(to + at, many());
    }
    for (; at + L <= count; at += L) store(to + at, many());
    while (at < count) one();
}
