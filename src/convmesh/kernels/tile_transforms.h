// Winograd's smallest algorithm: two results of a kernel with three taps by four multiplications instead of six, and in
// two dimensions four results of nine taps by 16 instead of 36.
//
//     results = A^T ((G taps) * (B^T numbers))
//
// B^T takes four numbers, G three taps, and A^T leaves two results. The gradient of the taps is the adjoint of this,
// G^T ((A gradient) * (B^T numbers)). All factors are powers of two, so that rounding is that of a few additions.
#pragma once

#include "vectors.h"

constexpr int SIDE = 4, RESULTS = 2, TAPS = 3, FREQUENCIES = SIDE * SIDE;

// What a transform does along one dimension; numbers are `step` apart.
struct NumbersIn {
    static constexpr int FROM = 4, TO = 4;
    template <class V> static INLINE void apply(const V *x, int step, V *y) {
        y[0] = x[0] - x[2 * step], y[1] = x[step] + x[2 * step];
        y[2] = x[2 * step] - x[step], y[3] = x[step] - x[3 * step];
    }
};
struct TapsIn {
    static constexpr int FROM = 3, TO = 4;
    template <class V> static INLINE void apply(const V *x, int step, V *y) {
        const V outer = x[0] + x[2 * step];
        y[0] = x[0], y[1] = (outer + x[step]) / 2, y[2] = (outer - x[step]) / 2, y[3] = x[2 * step];
    }
};
struct ResultsOut {
    static constexpr int FROM = 4, TO = 2;
    template <class V> static INLINE void apply(const V *x, int step, V *y) {
        y[0] = x[0] + x[step] + x[2 * step], y[1] = x[step] - x[2 * step] - x[3 * step];
    }
};
struct GradientIn {
    static constexpr int FROM = 2, TO = 4;
    template <class V> static INLINE void apply(const V *x, int step, V *y) {
        y[0] = x[0], y[1] = x[0] + x[step], y[2] = x[0] - x[step], y[3] = -x[step];
    }
};
struct TapsOut {
    static constexpr int FROM = 4, TO = 3;
    template <class V> static INLINE void apply(const V *x, int step, V *y) {
        const V sum = (x[step] + x[2 * step]) / 2;
        y[0] = x[0] + sum, y[1] = (x[step] - x[2 * step]) / 2, y[2] = sum + x[3 * step];
    }
};

// Along both dimensions of a square, row by row.
template <class Transform, class V> INLINE void transform(const V *square, V *result) {
    constexpr int FROM = Transform::FROM, TO = Transform::TO;
    V half[FROM * TO], column[TO];
    for (int i = 0; i < FROM; i++) {
        Transform::apply(square + i, FROM, column);
        for (int j = 0; j < TO; j++) half[j * FROM + i] = column[j];
    }
    for (int j = 0; j < TO; j++) Transform::apply(half + j * FROM, 1, result + j * TO);
}

// Transformed numbers of neighbouring squares, which begin two numbers apart, to `to`; squares are `apart` there, and
// frequencies. Every number is a vector of channels. Of the four lines, each `count` long, the first begins `padding`
// behind where the first square does, and there are zeros around them.
template <class T>
INLINE void transform_numbers(
    const T *const *lines, Int count, Int padding, Int squares, T *to, Int apart, Int frequency) {
    constexpr Int L = LANES<T>;
    Vector<T> halves[SIDE][SIDE];  // of the square's columns, each transformed
    const auto read = [&](Int at, Vector<T> *half) {
        Vector<T> column[SIDE] = {};
        for (int i = 0; i < SIDE && at >= 0 && at < count; i++) column[i] = load(lines[i] + at * L);
        NumbersIn::apply(column, 1, half);
    };
    read(-padding, halves[2]), read(1 - padding, halves[3]);
    for (Int square = 0; square < squares; square++, to += apart) {
        for (int i = 0; i < SIDE; i++) halves[0][i] = halves[2][i], halves[1][i] = halves[3][i];
        read(RESULTS * square + 2 - padding, halves[2]), read(RESULTS * square + 3 - padding, halves[3]);
        for (int i = 0; i < SIDE; i++) {
            Vector<T> result[SIDE];
            NumbersIn::apply(&halves[0][i], SIDE, result);
            for (int j = 0; j < SIDE; j++) store(to + (i * SIDE + j) * frequency, result[j]);
        }
    }
}
