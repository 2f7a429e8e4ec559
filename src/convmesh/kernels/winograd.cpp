// The three products of a convolution with 3 x 3 taps that takes no steps, by Winograd's algorithm (tile_transforms.h):
// 16 products of matrices, one for each frequency, in place of the 36 numbers by taps that a tile of results has.
//
// Numbers are laid out by frequency, channel and tile, and the other operand as panels of columns, one frequency after
// another. A third dimension, in front, is left to the products, which add up its taps.
#include "parts.h"
#include "tile_transforms.h"
#include "tiles.h"

namespace {

constexpr Int NUMBERS_BYTES = 4 << 20;  // of transformed numbers at a time
constexpr Int TILES = 48;               // whose results are in the second-level cache at a time
constexpr Int PAGE_BYTES = 4096;        // numbers so far apart share the lines of a first-level cache
constexpr Int DEEP_TILES = 256;         // of a gradient, likewise

// The image, or for an image's gradient the response, and what is computed at its tiles.
struct Grid {
    Int channels, source[DIMS], result[DIMS], padding[DIMS], depth_taps;

    explicit Grid(const Problem &problem) : depth_taps(problem.kernel[0]) {
        const bool to_image = problem.wanted == IMAGE;
        channels = to_image ? problem.outputs : problem.inputs;
        for (int dim = 0; dim < DIMS; dim++) {
            source[dim] = to_image ? problem.response[dim] : problem.image[dim];
            result[dim] = to_image ? problem.image[dim] : problem.response[dim];
            padding[dim] = to_image ? problem.kernel[dim] - 1 - problem.padding[dim] : problem.padding[dim];
        }
    }
    Int lines() const { return (result[1] + 1) / RESULTS; }
    Int across() const { return (result[2] + 1) / RESULTS; }
    Int tiles() const { return lines() * across(); }           // of a plane
    Int planes() const { return result[0] + depth_taps - 1; }  // that are read of an image
    Int padded_line() const { return RESULTS * across() + RESULTS; }
    Int plane_offset(Int image, Int plane) const { return (image * planes() + plane) * tiles(); }
};

// At least so many numbers: how far apart frequencies lie, one of each of which is read or written at a time, so that
// these do not share the same few lines of a cache.
template <class T> Int spread(Int numbers) {
    constexpr Int PAGE = PAGE_BYTES / sizeof(T);
    return (numbers + PAGE - 1) / PAGE * PAGE + 2 * LANES<T>;
}

template <class T> class Winograd {
  public:
    struct Scratch {
        Buffer<T> plane, numbers, raw, panel, sums, results;
        bool padded = false;
    };

    Winograd(const Problem &problem, Int threads)
        : problem(problem), wanted(Wanted(problem.wanted)), grid(problem),
          columns(wanted == IMAGE ? problem.inputs : problem.outputs),
          widest(columns > LANES<T> ? 2 * LANES<T> : LANES<T>),
          shares(problem, problem.groups, columns, widest, false, threads), operands{problem} {
        const Int bytes = FREQUENCIES * grid.channels * grid.planes() * grid.tiles() * sizeof(T);
        at_once = std::clamp<Int>(NUMBERS_BYTES / bytes, 1, shares.images());
        pitch = at_once * grid.planes() * grid.tiles() + LANES<T>;  // a vector may end behind the last tile
        frequency = spread<T>(grid.channels * pitch);
        for (Int channel = 0; channel < grid.channels; channel++)
            for (Int tap = 0; tap < grid.depth_taps; tap++)
                taps.push_back(channel * pitch + tap * grid.tiles());
        for (Int image = 0; image < at_once; image++)
            for (Int plane = 0; plane < grid.result[0]; plane++)
                for (Int tile = 0; tile < grid.tiles(); tile++)
                    tiles.push_back(grid.plane_offset(image, plane) + tile);
    }

    Int items() const { return shares.items(); }

    void compute(Int item, Scratch &scratch) const {
        for (Part part = shares.part(item, at_once); part.images > 0; shares.next(part, item, at_once)) {
            read_numbers(part, scratch);
            for (Int column = part.first_column; column < part.last_column; column += widest)
                if (wanted == KERNEL)
                    add_to_kernel(part, column, scratch);
                else
                    compute_results(part, column, scratch);
        }
    }

  private:
    const Problem &problem;
    const Wanted wanted;
    const Grid grid;
    const Int columns, widest;         // of a group, and of a panel
    const Shares shares;
    const Operands<T> operands;
    Int at_once;                       // images
    Int pitch, frequency;              // how far channels, and frequencies, of transformed numbers are apart
    std::vector<int32_t> taps, tiles;  // offsets into transformed numbers, by channel and tap of the depth, and by tile

    void read_numbers(const Part &part, Scratch &scratch) const {
        const Int *steps = wanted == IMAGE ? problem.response_steps : problem.image_steps;
        const T *from = wanted == IMAGE ? operands.response(part) : operands.image(part);
        const Int line = grid.padded_line();
        const Int size = (RESULTS * grid.lines() + RESULTS) * line + 2 * LANES<T>;  // vectors may end behind it
        T *plane = scratch.plane.reserve(size);
        if (!scratch.padded) std::fill_n(plane, size, T(0)), scratch.padded = true;  // it stays so around what is read
        T *numbers = scratch.numbers.reserve(FREQUENCIES * frequency);
        for (Int channel = 0; channel < grid.channels; channel++)
            for (Int n = 0; n < part.images; n++)
                for (Int depth = 0; depth < grid.planes(); depth++) {
                    T *to = numbers + channel * pitch + grid.plane_offset(n, depth);
                    const Int at = depth - grid.padding[0];
                    if (at < 0 || at >= grid.source[0]) {
                        for (int f = 0; f < FREQUENCIES; f++) std::fill_n(to + f * frequency, grid.tiles(), T(0));
                        continue;
                    }
                    const T *source = from + n * steps[1] + channel * steps[2] + at * grid.source[1] * grid.source[2];
                    for (Int h = 0; h < grid.source[1]; h++)
                        copy(plane + (h + grid.padding[1]) * line + grid.padding[2], source + h * grid.source[2],
                             grid.source[2]);
                    // A vector that is too long writes where the next line will, or behind the last one.
                    for (Int i = 0; i < grid.lines(); i++)
                        for (Int tile = 0; tile < grid.across(); tile += LANES<T>)
                            transform_numbers(plane + RESULTS * (i * line + tile), line, to + i * grid.across() + tile,
                                              frequency);
                }
    }

    // As many as it takes for so many columns.
    Int width_of(Int wide) const { return wide <= LANES<T> ? LANES<T> : widest; }

    // sums[f][row][...] of products of some rows of transformed numbers and a panel.
    void multiply_all(const Factors<T> &factors, Int width, T *sums, Int sums_apart, bool add) const {
        const Int panel_apart = spread<T>(factors.depth * width);
        for (int f = 0; f < FREQUENCIES; f++) {
            Factors<T> one = factors;
            one.source += f * frequency, one.panel += f * panel_apart;
            if (width == LANES<T>)
                multiply_rows<T, NARROW>(one, 0, one.row_count, sums + f * sums_apart, add);
            else
                multiply_rows<T, WIDE>(one, 0, one.row_count, sums + f * sums_apart, add);
        }
    }

    void compute_results(const Part &part, Int column, Scratch &scratch) const {
        const Int wide = std::min(widest, columns - column), width = width_of(wide);
        const Int depth = taps.size(), across = grid.across();
        const T *panel = pack_taps(part, column, wide, scratch);
        const Int *steps = wanted == IMAGE ? problem.image_steps : problem.response_steps;
        const T *bias = (const T *)problem.bias;
        if (bias) bias += part.sample * problem.bias_step + part.group * columns + column;
        T *start = (wanted == IMAGE ? operands.image(part) : operands.response(part)) + column * steps[2];
        const Target<T> target{start, steps[1], steps[2], volume(grid.result), nullptr, bias, false, false};
        const Int lines = part.images * grid.result[0] * grid.lines(), some = std::max<Int>(1, TILES / across);
        const Int apart = spread<T>(some * across * width);
        T *sums = scratch.sums.reserve(FREQUENCIES * apart);
        for (Int first = 0; first < lines; first += some) {
            const Int count = std::min(some, lines - first);
            const int32_t *rows = tiles.data() + first * across;
            multiply_all({scratch.numbers.get(), rows, count * across, taps.data(), depth, panel}, width, sums,
                         apart, false);
            for (Int line = first; line < first + count; line++)
                write_line(sums + (line - first) * across * width, apart, line, wide, target, scratch);
        }
    }

    // The results of a line of tiles, one or two lines of a plane.
    void write_line(const T *sums, Int apart, Int line, Int wide, const Target<T> &target, Scratch &scratch) const {
        constexpr Int L = LANES<T>;
        const Int plane = line / grid.lines(), first = line % grid.lines() * RESULTS, across = grid.result[2];
        const Int width = width_of(wide);
        T *results = scratch.results.reserve(2 * RESULTS * grid.across() * width);
        for (Int tile = 0; tile < grid.across(); tile++, sums += width)
            for (Int left = 0; left < width; left += L) {
                Vector<T> square[FREQUENCIES], four[RESULTS * RESULTS];
                for (int f = 0; f < FREQUENCIES; f++) square[f] = load(sums + f * apart + left);
                transform<ResultsOut>(square, four);
                for (int i = 0; i < RESULTS; i++)
                    for (int j = 0; j < RESULTS; j++)
                        if (RESULTS * tile + j < across)
                            store(results + (i * across + RESULTS * tile + j) * width + left, four[i * RESULTS + j]);
            }
        const Int lines = std::min<Int>(RESULTS, grid.result[1] - first);
        write<T>(results, (plane * grid.result[1] + first) * across, lines * across, width, wide, target);
    }

    // A panel [f][channel and tap of the depth][column] of transformed taps.
    const T *pack_taps(const Part &part, Int column, Int wide, Scratch &scratch) const {
        constexpr Int L = LANES<T>, PLANE = TAPS * TAPS;
        const Int step = problem.kernel_steps[1], all = volume(problem.kernel), depth = taps.size();
        const Int width = width_of(wide);
        const Int apart = spread<T>(depth * width);
        T *panel = scratch.panel.reserve(FREQUENCIES * apart), *raw = scratch.raw.reserve(depth * PLANE * width);
        if (wanted == RESPONSE)
            transpose_into(raw, depth * PLANE, width, operands.kernel(part) + column * step, step, wide);
        else
            for (Int channel = 0; channel < grid.channels; channel++) {
                const T *from = operands.kernel(part) + channel * step + column * all;
                transpose_into(raw + channel * all * width, all, width, from, all, wide);
            }
        for (Int k = 0; k < depth; k++) {
            // To an image they lead the other way round.
            const Int channel = k / grid.depth_taps, tap = k % grid.depth_taps;
            const Int last = channel * all + all - 1 - tap * PLANE;
            for (Int left = 0; left < width; left += L) {
                Vector<T> square[PLANE], result[FREQUENCIES];
                for (int i = 0; i < PLANE; i++)
                    square[i] = load(raw + (wanted == IMAGE ? last - i : k * PLANE + i) * width + left);
                transform<TapsIn>(square, result);
                for (int f = 0; f < FREQUENCIES; f++) store(panel + f * apart + k * width + left, result[f]);
            }
        }
        return panel;
    }

    // Sums of a kernel are kept by column until the last image, unless there is nothing to wait for.
    void add_to_kernel(const Part &part, Int column, Scratch &scratch) const {
        const Int wide = std::min(widest, columns - column), rows = taps.size(), apart = spread<T>(rows * widest);
        const bool alone = at_once >= problem.images;
        const Int held = alone ? 1 : (part.last_column - part.first_column + widest - 1) / widest;
        T *sums = scratch.sums.reserve(held * FREQUENCIES * apart);
        if (!alone) sums += (column - part.first_column) / widest * FREQUENCIES * apart;
        const Int planes = part.images * grid.result[0], some = std::max<Int>(1, DEEP_TILES / grid.tiles());
        for (Int first = 0; first < planes; first += some) {
            const Int count = std::min(some, planes - first), depth = count * grid.tiles();
            const T *panel = pack_gradient(part, first, count, column, wide, scratch);
            const int32_t *shifts = tiles.data() + first * grid.tiles();
            multiply_all({scratch.numbers.get(), taps.data(), rows, shifts, depth, panel}, width_of(wide), sums, apart,
                         first + part.first_image > 0);
        }
        if (part.first_image + part.images == problem.images) write_kernel(part, column, wide, sums, apart, scratch);
    }

    // A panel [f][tile][column] of the transformed response, of some planes.
    const T *pack_gradient(const Part &part, Int first, Int count, Int column, Int wide, Scratch &scratch) const {
        constexpr Int L = LANES<T>;
        const Int *steps = problem.response_steps, size = grid.result[1] * grid.result[2], width = width_of(wide);
        const Int apart = spread<T>(count * grid.tiles() * width);
        T *panel = scratch.panel.reserve(FREQUENCIES * apart), *raw = scratch.raw.reserve(size * width);
        for (Int number = 0; number < count; number++) {
            const Int n = (first + number) / grid.result[0], plane = (first + number) % grid.result[0];
            const T *from = operands.response(part) + n * steps[1] + column * steps[2] + plane * size;
            transpose_into(raw, size, width, from, steps[2], wide);
            for (Int tile = 0; tile < grid.tiles(); tile++) {
                const Int h = tile / grid.across() * RESULTS, w = tile % grid.across() * RESULTS;
                T *to = panel + (number * grid.tiles() + tile) * width;
                for (Int left = 0; left < width; left += L) {
                    Vector<T> four[RESULTS * RESULTS], result[FREQUENCIES];
                    for (int i = 0; i < RESULTS; i++)
                        for (int j = 0; j < RESULTS; j++) {
                            const bool inside = h + i < grid.result[1] && w + j < grid.result[2];
                            const T *place = raw + ((h + i) * grid.result[2] + w + j) * width + left;
                            four[i * RESULTS + j] = inside ? load(place) : Vector<T>{};
                        }
                    transform<GradientIn>(four, result);
                    for (int f = 0; f < FREQUENCIES; f++) store(to + f * apart + left, result[f]);
                }
            }
        }
        return panel;
    }

    void write_kernel(const Part &part, Int column, Int wide, const T *sums, Int apart, Scratch &scratch) const {
        constexpr Int L = LANES<T>, PLANE = TAPS * TAPS, AT_ONCE = 32;
        const Int step = problem.kernel_steps[1], rows = taps.size(), width = width_of(wide);
        T *start = operands.kernel(part) + column * step;
        const Target<T> target{start, 0, step, rows * PLANE, nullptr, nullptr, false, past_caches<T>(problem)};
        T *results = scratch.results.reserve(AT_ONCE * PLANE * width);
        for (Int first = 0; first < rows; first += AT_ONCE) {
            const Int count = std::min(AT_ONCE, rows - first);
            for (Int row = 0; row < count; row++)
                for (Int left = 0; left < width; left += L) {
                    Vector<T> square[FREQUENCIES], result[PLANE];
                    const T *from = sums + (first + row) * width + left;
                    for (int f = 0; f < FREQUENCIES; f++) square[f] = load(from + f * apart);
                    transform<TapsOut>(square, result);
                    for (int i = 0; i < PLANE; i++) store(results + (row * PLANE + i) * width + left, result[i]);
                }
            write<T>(results, first * PLANE, count * PLANE, width, wide, target);
        }
    }
};

}  // namespace

extern "C" void convmesh_winograd_float32(const Problem *problem, Int threads) {
    compute_all(Winograd<float>(*problem, threads), threads);
}
extern "C" void convmesh_winograd_float64(const Problem *problem, Int threads) {
    compute_all(Winograd<double>(*problem, threads), threads);
}
