// The three products of a convolution with 3 x 3 taps that takes no steps, by Winograd's algorithm (tile_transforms.h):
// 16 products of matrices, one for each frequency, in place of the 36 numbers by taps that a tile of results has.
//
// Numbers are laid out by frequency, tile and channel, and the other operand as panels of columns, one frequency after
// another. Panels that are small enough are all made beforehand, and then numbers of some tiles at a time, which are in
// the second-level cache for all columns. Else panels are made one after the other, of numbers that are all there. A
// third dimension, in front, is left to the products, which add up its taps.
#include "tiles.h"
#include "winograd_numbers.h"

namespace {

constexpr Int NUMBERS_BYTES = 4 << 20;  // of transformed numbers at a time
constexpr Int TILES = 48;               // whose results are in the second-level cache at a time
constexpr Int DEEP_TILES = 256;         // of a gradient, likewise
constexpr Int CHANNELS = 16;            // of a kernel, whose taps are in the first-level cache at a time
constexpr Int PANELS_BYTES = 1 << 20;   // of all columns, that are made beforehand

template <class T> class Winograd {
  public:
    struct Scratch {
        Buffer<T> plane, numbers, raw, panel, sums, results;
        Part read{-1, 0, 0, 0, 0, 0};  // what the numbers are of, where they are all there
    };

    Winograd(const Problem &problem, Int threads)
        : problem(problem), wanted(Wanted(problem.wanted)), grid(problem),
          samples(together(problem)), of_sample(wanted == IMAGE ? problem.inputs : problem.outputs),
          columns(of_sample * samples), widest(columns > LANES<T> ? 2 * LANES<T> : LANES<T>),
          row((grid.channels + LANES<T> - 1) / LANES<T> * LANES<T>),
          shares(problem, problem.samples / samples * problem.groups, problem.groups, columns, widest, false, threads),
          operands{problem} {
        some = std::max<Int>(1, TILES / grid.across());
        panels_apart = FREQUENCIES * spread<T>(grid.channels * grid.depth_taps * widest);
        const Int panels = (columns + widest - 1) / widest * panels_apart * sizeof(T);
        beforehand = wanted != KERNEL && grid.depth_taps == 1 && panels <= PANELS_BYTES;
        const Int bytes = FREQUENCIES * row * grid.planes() * grid.tiles() * sizeof(T);
        at_once = beforehand ? shares.images() : std::clamp<Int>(NUMBERS_BYTES / bytes, 1, shares.images());
        const Int rows = beforehand ? some * grid.across() : at_once * grid.planes() * grid.tiles();
        frequency = spread<T>(rows * row);
        for (Int channel = 0; channel < grid.channels; channel++)
            for (Int tap = 0; tap < grid.depth_taps; tap++) taps.push_back(channel + tap * grid.tiles() * row);
        for (Int image = 0; image < (beforehand ? 0 : at_once); image++)
            for (Int plane = 0; plane < grid.result[0]; plane++)
                for (Int tile = 0; tile < grid.tiles(); tile++)
                    tiles.push_back(((image * grid.planes() + plane) * grid.tiles() + tile) * row);
        for (Int tile = 0; tile < (beforehand ? rows : 0); tile++) tiles.push_back(tile * row);
    }

    Int items() const { return shares.items(); }

    void compute(Int item, Scratch &scratch) const {
        for (Part part = shares.part(item, at_once); part.images > 0; shares.next(part, item, at_once)) {
            if (beforehand) {
                compute_by_block(part, scratch);
                continue;
            }
            const Part &read = scratch.read;
            if (part.sample != read.sample || part.group != read.group || part.first_image != read.first_image)
                read_numbers(part, 0, part.images * grid.planes() * grid.lines(), scratch);
            scratch.read = part;
            for (Int column = part.first_column; column < part.last_column; column += widest)
                if (wanted == KERNEL)
                    add_to_kernel(part, column, scratch);
                else
                    compute_column(part, column, scratch);
        }
    }

  private:
    const Problem &problem;
    const Wanted wanted;
    const Grid grid;
    const Int samples, of_sample;      // samples whose columns are one behind the other
    const Int columns, widest;         // of a set, and of a panel
    const Int row;                     // how far tiles of numbers are apart: their channels, in whole vectors
    const Shares shares;
    const Operands<T> operands;
    bool beforehand;                   // whether all panels are made before numbers are read
    Int at_once;                       // images
    Int some;                          // lines of tiles, whose results are computed at a time
    Int frequency, panels_apart;       // how far frequencies of numbers are apart, and panels
    std::vector<int32_t> taps, tiles;  // offsets into transformed numbers, by channel and tap of the depth, and by tile

    void read_numbers(const Part &part, Int first, Int count, Scratch &scratch) const {
        const Numbers<T> numbers{problem, grid, row, frequency, some};
        numbers.read(part, first, count, scratch.plane, scratch.numbers.reserve(FREQUENCIES * frequency));
    }

    Columns<T> block_of(const Part &part, Int column) const {
        const Int wide = std::min(widest, columns - column);
        return Columns<T>(problem, part, column, wide, of_sample, volume(problem.kernel));
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

    void compute_by_block(const Part &part, Scratch &scratch) const {
        const Int blocks = (part.last_column - part.first_column + widest - 1) / widest;
        T *panels = scratch.panel.reserve(blocks * panels_apart);
        const auto column = [&](Int i) { return part.first_column + i * widest; };
        for (Int i = 0; i < blocks; i++) pack_taps(part, column(i), panels + i * panels_apart, scratch);
        const Int lines = part.images * grid.result[0] * grid.lines();
        for (Int first = 0; first < lines; first += some) {
            const Int count = std::min(some, lines - first);
            read_numbers(part, first, count, scratch);
            for (Int i = 0; i < blocks; i++)
                compute_results(
                    part, column(i), panels + i * panels_apart, first, count, tiles.data(), scratch);
        }
    }

    void compute_column(const Part &part, Int column, Scratch &scratch) const {
        T *panels = scratch.panel.reserve(panels_apart);
        pack_taps(part, column, panels, scratch);
        const Int lines = part.images * grid.result[0] * grid.lines();
        for (Int first = 0; first < lines; first += some)
            compute_results(part, column, panels, first, std::min(some, lines - first),
                            tiles.data() + first * grid.across(), scratch);
    }

    // Of `count` lines of tiles, whose numbers are at `rows`.
    void compute_results(
        const Part &part, Int column, const T *panel, Int first, Int count, const int32_t *rows,
        Scratch &scratch) const {
        const Int wide = std::min(widest, columns - column), width = width_of(wide);
        const Int depth = taps.size(), across = grid.across();
        const Int step = wanted == IMAGE ? problem.image_steps[1] : problem.response_steps[1];
        const Columns<T> block = block_of(part, column);
        T *start = wanted == IMAGE ? operands.image(part) : operands.response(part);
        const Target<T> target{start, step, block.wanted, volume(grid.result), nullptr, block.bias, false, false};
        const Int apart = spread<T>(some * across * width);
        T *sums = scratch.sums.reserve(FREQUENCIES * apart);
        multiply_all({scratch.numbers.get(), rows, count * across, taps.data(), depth, panel}, width, sums, apart,
                     false);
        for (Int line = first; line < first + count; line++)
            write_line(sums + (line - first) * across * width, apart, line, wide, target, scratch);
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
    void pack_taps(const Part &part, Int column, T *panel, Scratch &scratch) const {
        constexpr Int L = LANES<T>, PLANE = TAPS * TAPS;
        const Int step = problem.kernel_steps[1], all = volume(problem.kernel), depth = grid.depth_taps;
        const Int wide = std::min(widest, columns - column), width = width_of(wide);
        const Int apart = spread<T>(taps.size() * width);
        T *raw = scratch.raw.reserve(CHANNELS * all * width);
        const Columns<T> block = block_of(part, column);
        const T *from = operands.kernel(part);
        for (Int first = 0; first < grid.channels; first += CHANNELS) {
            const Int count = std::min(CHANNELS, grid.channels - first);
            if (wanted == RESPONSE)
                transpose_into(raw, count * all, width, from + first * all, block.given, wide);
            else
                for (Int i = 0; i < count; i++)
                    transpose_into(raw + i * all * width, all, width, from + (first + i) * step, block.given, wide);
            for (Int k = 0; k < count * depth; k++) {
                // To an image they lead the other way round.
                const Int last = k / depth * all + all - 1 - k % depth * PLANE;
                T *to = panel + (first * depth + k) * width;
                for (Int left = 0; left < width; left += L) {
                    Vector<T> square[PLANE], result[FREQUENCIES];
                    for (int i = 0; i < PLANE; i++)
                        square[i] = load(raw + (wanted == IMAGE ? last - i : k * PLANE + i) * width + left);
                    transform<TapsIn>(square, result);
                    for (int f = 0; f < FREQUENCIES; f++) store(to + f * apart + left, result[f]);
                }
            }
        }
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
        const Int size = grid.result[1] * grid.result[2], width = width_of(wide);
        const Columns<T> block = block_of(part, column);
        const Int apart = spread<T>(count * grid.tiles() * width);
        T *panel = scratch.panel.reserve(FREQUENCIES * apart), *raw = scratch.raw.reserve(size * width);
        for (Int number = 0; number < count; number++) {
            const Int n = (first + number) / grid.result[0], plane = (first + number) % grid.result[0];
            const T *from = operands.response(part) + n * problem.response_steps[1] + plane * size;
            transpose_into(raw, size, width, from, block.given, wide);
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
        const Int rows = taps.size(), width = width_of(wide);
        const Columns<T> block = block_of(part, column);
        T *start = operands.kernel(part);
        const Target<T> target{start, 0, block.wanted, rows * PLANE, nullptr, nullptr, false, past_caches<T>(problem)};
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
