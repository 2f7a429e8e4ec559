// Products of matrices, a tile of the result at a time, and writing them where they belong.
#pragma once

#include "reading.h"

constexpr Int DEPTH = 512, ROWS = 96;  // of a panel and of sums at a time: a first-level cache

// Kernels of so many bytes, of all samples, are written past the caches.
constexpr Int LARGE_KERNELS = 32 << 20;

template <class T> bool past_caches(const Problem &problem) {
    const Int kernel = problem.groups * problem.outputs * problem.inputs * volume(problem.kernel);
    return problem.wanted == KERNEL && problem.samples * kernel * Int(sizeof(T)) >= LARGE_KERNELS;
}

// Where sums go, of which a row is a place of an image, or a tap of a kernel.
template <class T> struct Target {
    T *start;
    Int image_step;
    const Int *columns;  // how far each of these is from `start`
    Int rows_of_image;
    const Int *places;  // of the rows of an image; none if these lie one after the other
    const T *bias;      // of these columns
    bool add, past_caches;

    void put(T &place, T sum, Int column) const {
        if (bias) sum += bias[column];
        place = add ? place + sum : sum;
    }

    // Row i of a transposed square of sums goes to column + i, from its row on.
    INLINE void put_square(Vector<T> *square, T *image, Int row, Int column) const {
        constexpr int L = LANES<T>;
        const Int *places = columns + column;
        image += row;
        if (bias)
            for (int i = 0; i < L; i++) square[i] += bias[column + i];
        if (past_caches && !add) {
            for (int i = 0; i < L; i++)
                may_begin(image + places[i]) ? store_past_caches(image + places[i], square[i])
                                             : store(image + places[i], square[i]);
            return;
        }
        if (add)
            for (int i = 0; i < L; i++) square[i] += load(image + places[i]);
#pragma GCC unroll 16
        for (int i = 0; i < L; i++) store(image + places[i], square[i]);
    }
};

// Rows [first, first + count) of sums, each `width` wide, of which `columns` are wanted.
template <class T> void write(const T *sums, Int first, Int count, Int width, Int columns, const Target<T> &target) {
    constexpr Int L = LANES<T>;
    for (const Int stop = first + count; first < stop; first += count, sums += count * width) {
        const Int at = first % target.rows_of_image;
        T *image = target.start + first / target.rows_of_image * target.image_step;
        count = std::min(stop - first, target.rows_of_image - at);
        // Squares overlap rather than leaving rows to be written one by one; but not where sums are added.
        const bool in_squares = !target.places && count >= L && (!target.add || count % L == 0);
        for (Int left = 0; left < columns; left += L) {
            if (in_squares && left + L <= columns) {
                for (Int next = 0; next < count; next += L) {
                    const Int row = std::min(next, count - L);
                    Vector<T> square[L];
#pragma GCC unroll 16
                    for (int i = 0; i < L; i++) square[i] = load(sums + (row + i) * width + left);
                    transpose<T>(square);
                    target.put_square(square, image, at + row, left);
                }
                continue;
            }
            for (Int column = left; column < std::min(columns, left + L); column++)
                for (Int row = 0; row < count; row++) {
                    const Int place = target.places ? target.places[at + row] : at + row;
                    target.put(image[target.columns[column] + place], sums[row * width + column], column);
                }
        }
    }
}

template <class T> struct Factors {
    const T *source;
    const int32_t *rows;
    Int row_count;
    const int32_t *shifts;
    Int depth;
    const T *panel;
};

// The least length that cuts a whole into as many parts as `most` does.
inline Int even_share(Int whole, Int most) {
    const Int parts = std::max<Int>(1, (whole + most - 1) / most);
    return (whole + parts - 1) / parts;
}

enum Kind { WIDE, NARROW, LANEWISE };  // panels of two vectors or one; or every column has a source of its own

template <class T> using TileFunction = void (*)(const T *const *, const int32_t *, Int, const T *, T *, bool);

// What multiplies a tile of so many rows, from one on.
template <class T, Kind kind, int... R> TileFunction<T> tile_function(Int rows, std::integer_sequence<int, R...>) {
    if constexpr (kind == LANEWISE) {
        static constexpr TileFunction<T> functions[] = {multiply_lanes<T, R + 1>...};
        return functions[rows - 1];
    } else {
        static constexpr TileFunction<T> functions[] = {multiply_tile<T, R + 1, kind == WIDE ? 2 : 1>...};
        return functions[rows - 1];
    }
}

// sums[r] = row first + r of the product, for `count` rows, in tiles of about one size.
template <class T, Kind kind>
void multiply_rows(const Factors<T> &factors, Int first, Int count, T *sums, bool add = false) {
    constexpr int MOST = kind == WIDE ? TILE_ROWS : NARROW_ROWS;
    constexpr Int WIDTH = (kind == WIDE ? 2 : 1) * LANES<T>, SOURCES = kind == LANEWISE ? LANES<T> : 1;
    if (!factors.depth && !add) std::fill_n(sums, count * WIDTH, T(0));
    const Int step = even_share(factors.depth, DEPTH), tile = even_share(count, MOST);
    for (Int k = 0; k < factors.depth; k += step)
        for (Int r = 0; r < count; r += tile) {
            const Int some = std::min(tile, count - r), depth = std::min(step, factors.depth - k);
            const T *rows[MOST];
            for (Int i = 0; i < some; i++) rows[i] = factors.source + factors.rows[first + r + i] * SOURCES;
            const auto multiply = tile_function<T, kind>(some, std::make_integer_sequence<int, MOST>());
            multiply(rows, factors.shifts + k, depth, factors.panel + k * WIDTH, sums + r * WIDTH, add || k > 0);
        }
}

template <class T, Kind kind>
void multiply(const Factors<T> &factors, T *sums, Int columns, const Target<T> &target) {
    constexpr Int WIDTH = (kind == WIDE ? 2 : 1) * LANES<T>;
    const Int some = even_share(factors.row_count, ROWS);
    for (Int first = 0; first < factors.row_count; first += some) {
        const Int count = std::min(some, factors.row_count - first);
        multiply_rows<T, kind>(factors, first, count, sums);
        write<T>(sums, first, count, WIDTH, columns, target);
    }
}

// The same for few columns, where a vector is of rows that lie side by side.
template <class T, int COLUMNS>
void multiply_few(const Factors<T> &factors, const Piece *pieces, Int count, T *sums, const Target<T> &target) {
    constexpr Int L = LANES<T>;
    constexpr int AT_ONCE = COLUMNS < 3 ? 8 / COLUMNS : 2 * TILE_ROWS / COLUMNS;  // as registers permit
    for (Int first = 0; first < count; first += AT_ONCE) {
        const T *vectors[AT_ONCE];
        for (int v = 0; v < AT_ONCE; v++) vectors[v] = factors.source + pieces[std::min(first + v, count - 1)].place;
        multiply_runs<T, COLUMNS, AT_ONCE>(factors.panel, vectors, factors.shifts, factors.depth, sums);
        for (int v = 0; v < std::min<Int>(AT_ONCE, count - first); v++) {
            const Piece piece = pieces[first + v];
            for (int column = 0; column < COLUMNS; column++) {
                T *from = sums + (column * AT_ONCE + v) * L;
                T *to = target.start + piece.image * target.image_step + target.columns[column];
                if (target.bias) store(from, load(from) + target.bias[column]);
                if (!target.places)
                    copy(to + piece.first, from, piece.count);
                else
                    for (Int i = 0; i < piece.count; i++) to[target.places[piece.first + i]] = from[i];
            }
        }
    }
}

// The same for few columns of a kernel, where pieces are added up.
template <class T, int COLUMNS>
void multiply_few_dots(const Factors<T> &factors, const Piece *pieces, Int count, T *sums, const Target<T> &target) {
    constexpr int R = std::min(8, 2 * TILE_ROWS / COLUMNS);  // as registers permit
    for (Int first = 0; first < factors.row_count; first += R) {
        const T *rows[R];
        for (int r = 0; r < R; r++) rows[r] = factors.source + factors.rows[std::min(first + r, factors.row_count - 1)];
        multiply_dots<T, R, COLUMNS>(rows, pieces, count, factors.panel, sums);
        write<T>(sums, first, std::min<Int>(R, factors.row_count - first), LANES<T>, COLUMNS, target);
    }
}
