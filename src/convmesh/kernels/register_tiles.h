// Tiles of sums of products that stay in registers.
#pragma once

#include "vectors.h"

// sums[r][c] = sum over k of rows[r][shifts[k]] * panel[k][c], for R rows and C vectors of columns.
//
// Rows are read one number at a time, wherever they are, so that patches of an image are never laid out in memory.
// The panel is read a vector at a time, in the order in which it lies.
template <class T, int R, int C>
APART void multiply_tile(const T *const *rows, const int32_t *shifts, Int depth, const T *panel, T *sums, bool add) {
    constexpr Int L = LANES<T>;
    Vector<T> tile[R][C];
    const T *row[R];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
        row[r] = rows[r];
#pragma GCC unroll 16
        for (int c = 0; c < C; c++) tile[r][c] = add ? load(sums + (r * C + c) * L) : Vector<T>{};
    }
    for (Int k = 0; k < depth; k++, panel += C * L) {
        const Int shift = shifts[k];
        Vector<T> columns[C];
#pragma GCC unroll 16
        for (int c = 0; c < C; c++) columns[c] = load(panel + c * L);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
            const T factor = row[r][shift];
#pragma GCC unroll 16
            for (int c = 0; c < C; c++) tile[r][c] += factor * columns[c];
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 16
        for (int c = 0; c < C; c++) store(sums + (r * C + c) * L, tile[r][c]);
}

// sums[r][c] = sum over k of factors[k][r] * columns[c][shifts[k]...], for R rows and C vectors of columns.
//
// The other way round: what lies side by side in an image is read a vector at a time. For few rows.
template <class T, int R, int C>
APART void multiply_runs(const T *factors, const T *const *columns, const int32_t *shifts, Int depth, T *sums) {
    constexpr Int L = LANES<T>;
    Vector<T> tile[R][C];
    const T *column[C];
#pragma GCC unroll 16
    for (int c = 0; c < C; c++) {
        column[c] = columns[c];
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) tile[r][c] = Vector<T>{};
    }
    for (Int k = 0; k < depth; k++, factors += R) {
        const Int shift = shifts[k];
        Vector<T> read[C];
#pragma GCC unroll 16
        for (int c = 0; c < C; c++) read[c] = load(column[c] + shift);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
            const T factor = factors[r];
#pragma GCC unroll 16
            for (int c = 0; c < C; c++) tile[r][c] += factor * read[c];
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 16
        for (int c = 0; c < C; c++) store(sums + (r * C + c) * L, tile[r][c]);
}

// Places of an image side by side, as many as a vector has lanes at most, and the first of them in a result.
struct Piece {
    int32_t place, image, first, count;
};

// sums[r] = sum over k of rows[r][shifts[k]] * panel[k], where all of these are vectors: every lane by itself.
template <class T, int R>
APART void multiply_lanes(const T *const *rows, const int32_t *shifts, Int depth, const T *panel, T *sums, bool add) {
    constexpr Int L = LANES<T>;
    Vector<T> tile[R];
    const T *row[R];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) row[r] = rows[r], tile[r] = add ? load(sums + r * L) : Vector<T>{};
    for (Int k = 0; k < depth; k++, panel += L) {
        const Int shift = shifts[k] * L;
        const Vector<T> factor = load(panel);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) tile[r] += factor * load(row[r] + shift);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) store(sums + r * L, tile[r]);
}

// sums[r][c] = sum over pieces of rows[r][place...] * columns[c], a vector of each, and of its lanes.
//
// What lies side by side in an image is added up: for few columns. They have zeros behind the lanes that are in use;
// rows have other numbers there, which need not be finite.
template <class T, int R, int C>
APART void multiply_dots(const T *const *rows, const Piece *pieces, Int depth, const T *columns, T *sums) {
    constexpr Int L = LANES<T>;
    typedef typename OfMachine<T>::Bits Bits;
    Vector<T> tile[R][C];
    const T *row[R];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
        row[r] = rows[r];
#pragma GCC unroll 16
        for (int c = 0; c < C; c++) tile[r][c] = Vector<T>{};
    }
    Bits lane;
    for (Int i = 0; i < L; i++) lane[i] = i;
    for (Int k = 0; k < depth; k++, columns += C * L) {
        const Bits used = lane < pieces[k].count;
        Vector<T> read[R];
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) read[r] = (Vector<T>)((Bits)load(row[r] + pieces[k].place) & used);
#pragma GCC unroll 16
        for (int c = 0; c < C; c++) {
            const Vector<T> column = load(columns + c * L);
#pragma GCC unroll 16
            for (int r = 0; r < R; r++) tile[r][c] += read[r] * column;
        }
    }
#pragma GCC unroll 16
    for (int first = 0; first < R * C; first += L) {
        Vector<T> square[L], sum{};
#pragma GCC unroll 16
        for (int i = 0; i < L; i++) square[i] = first + i < R * C ? tile[(first + i) / C][(first + i) % C] : Vector<T>{};
        transpose<T>(square);
#pragma GCC unroll 16
        for (int i = 0; i < L; i++) sum += square[i];
#pragma GCC unroll 16
        for (int i = 0; i < L; i++)
            if (first + i < R * C) sums[(first + i) / C * L + (first + i) % C] = sum[i];
    }
}
