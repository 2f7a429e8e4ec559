// The three products of a convolution, of many samples at once.
//
// Each is a product of matrices: of rows that an image, or a response, is read at, places by shifts (reading.h), and a
// panel of columns that a kernel, or a response, is packed into (tiles.h). Of everything about as much as a cache holds
// is taken at a time. Threads share the samples, their groups, and columns where there are few of these.
//
// Columns are the channels of the result. Where a group has but one, they are groups, each with a source of its own.
#include "parts.h"
#include "tiles.h"

namespace {

constexpr Int IMAGES_BYTES = 1 << 20;  // of padded images at a time: a second-level cache
constexpr Int FEW = 8;                 // columns, for which vectors are made of rows
constexpr Int TRANSPOSED = 6;          // products, which take as long as transposing their sum
template <class T> constexpr Int FEWEST = std::min(FEW, LANES<T> / 2);  // as registers permit

template <class T> class Product {
  public:
    struct Scratch {
        Buffer<T> images, plane, taps, panel, sums;
        const T *read = nullptr;  // what the images are of, and how many
        Int count = 0;
        bool padded = false;
    };

    Product(const Problem &problem, Int threads)
        : problem(problem), wanted(Wanted(problem.wanted)), lanewise(is_lanewise(problem)),
          samples(lanewise ? 1 : together(problem)),
          of_sample(lanewise ? problem.groups : wanted == IMAGE ? problem.inputs : problem.outputs),
          columns(of_sample * samples), few(is_few(Reading(problem, 1, 0, LANES<T>))),
          width(few ? std::min(columns, FEWEST<T>) : !lanewise && columns > LANES<T> ? 2 * LANES<T> : LANES<T>),
          shares(problem, problem.samples / samples * groups(), groups(), columns, width, lanewise, threads),
          operands{problem} {
        const Int channels = lanewise ? width : wanted == IMAGE ? problem.outputs : problem.inputs;
        const Int bytes = volume(wanted == IMAGE ? problem.response : problem.image) * channels * sizeof(T);
        at_once = std::clamp<Int>(IMAGES_BYTES / bytes, 1, shares.images());
        for (Int phase = 0; phase < (wanted == IMAGE ? volume(problem.stride) : 1); phase++)
            readings.emplace_back(problem, at_once, phase, LANES<T>);
    }

    Int items() const { return shares.items(); }

    void compute(Int item, Scratch &scratch) const {
        for (Part part = shares.part(item, at_once); part.images > 0; shares.next(part, item, at_once)) {
            read_images(part, scratch);
            for (Int column = part.first_column; column < part.last_column; column += width)
                compute(part, column, scratch);
        }
    }

  private:
    const Problem &problem;
    const Wanted wanted;
    const bool lanewise;
    const Int samples, of_sample, columns;  // samples whose columns are one behind the other
    const bool few;                         // columns at a time, of vectors of places
    const Int width;
    const Shares shares;
    const Operands<T> operands;
    Int at_once;
    std::vector<Reading> readings;  // one for each phase, all of the same padded images

    // Where vectors of places are about full, results of a few products are not worth being transposed.
    bool is_few(const Reading &reading) const {
        constexpr Int L = LANES<T>;
        if (lanewise || reading.in_place) return reading.in_place;
        if (columns <= FEWEST<T>) return reading.run >= L / 2;
        const Int depth = reading.shifts.size(), lanes = (reading.run + L - 1) / L * L;
        return wanted != KERNEL && reading.run * (depth + TRANSPOSED) >= lanes * depth;
    }

    Int groups() const { return lanewise ? 1 : problem.groups; }
    Int places_of_image(const Reading &reading) const { return reading.places.size() / at_once; }

    void compute(const Part &part, Int column, Scratch &scratch) const {
        const Int wide = std::min(width, columns - column), taps = volume(problem.kernel);
        const Int across = few ? wide : wide <= LANES<T> ? LANES<T> : width;
        const Columns<T> block(problem, part, column, wide, of_sample, lanewise ? problem.kernel_steps[1] : taps);
        const T *panel = pack(part, block, wide, across, scratch);
        T *sums = scratch.sums.reserve(ROWS * 2 * LANES<T>);
        for (const Reading &reading : readings) {
            const Int places = places_of_image(reading) * part.images, shifts = reading.shifts.size();
            const int32_t *place = reading.places.data(), *shift = reading.shifts.data();
            const T *images = reading.in_place ? source(part) : scratch.images.get();
            Factors<T> factors{images, place, places, shift, shifts, panel};
            if (wanted == KERNEL) factors = {images, shift, shifts, place, places, panel};
            const Target<T> target = target_of(reading, part, block);
            if (few)
                multiply_by_pieces(factors, wide, reading, part, sums, target);
            else if (lanewise)
                multiply<T, LANEWISE>(factors, sums, wide, target);
            else if (across == LANES<T>)
                multiply<T, NARROW>(factors, sums, wide, target);
            else
                multiply<T, WIDE>(factors, sums, wide, target);
            panel += shifts * across;
        }
    }

    template <int COLUMNS = FEW>
    void multiply_by_pieces(
        const Factors<T> &factors, Int wide, const Reading &reading, const Part &part, T *sums,
        const Target<T> &target) const {
        if constexpr (COLUMNS > 0) {
            if (wide < COLUMNS) return multiply_by_pieces<COLUMNS - 1>(factors, wide, reading, part, sums, target);
            const Int count = reading.pieces.size() / at_once * part.images;
            if (wanted == KERNEL)
                multiply_few_dots<T, COLUMNS>(factors, reading.pieces.data(), count, sums, target);
            else
                multiply_few<T, COLUMNS>(factors, reading.pieces.data(), count, sums, target);
        }
    }

    Target<T> target_of(const Reading &reading, const Part &part, const Columns<T> &block) const {
        if (wanted == KERNEL) {
            const Int rows = reading.shifts.size();
            const bool add = part.first_image > 0;
            return {operands.kernel(part), 0, block.wanted, rows, nullptr, nullptr, add, past_caches<T>(problem)};
        }
        T *start = wanted == IMAGE ? operands.image(part) : operands.response(part);
        const Int step = wanted == IMAGE ? problem.image_steps[1] : problem.response_steps[1];
        const Int *scattered = reading.targets.empty() ? nullptr : reading.targets.data();
        return {start, step, block.wanted, places_of_image(reading), scattered, block.bias, false, false};
    }

    // Columns, `wide` of them, as a panel that is `across` wide, or one for each phase.
    const T *pack(const Part &part, const Columns<T> &block, Int wide, Int across, Scratch &scratch) const {
        const Int taps = volume(problem.kernel), step = problem.response_steps[1];
        if (wanted == RESPONSE) {
            T *panel = scratch.panel.reserve(problem.inputs * taps * across + LANES<T>);
            transpose_into(panel, problem.inputs * taps, across, operands.kernel(part), block.given, wide);
            return panel;
        }
        if (wanted == IMAGE) return pack_by_phase(operands.kernel(part), block, wide, across, scratch);
        const T *from = operands.response(part);
        const Int places = places_of_image(readings[0]), pieces = readings[0].pieces.size() / at_once;
        T *panel = scratch.panel.reserve((few ? pieces * LANES<T> : places) * part.images * across), *to = panel;
        for (Int n = 0; n < part.images && !few; n++, to += places * across)
            transpose_into(to, places, across, from + n * step, block.given, wide);
        const Piece *piece = readings[0].pieces.data(), *last = piece + pieces * part.images;
        for (; piece < last && few; piece++)
            for (Int c = 0; c < wide; c++, to += LANES<T>) {
                copy(to, from + piece->image * step + block.given[c] + piece->first, piece->count);
                std::fill(to + piece->count, to + LANES<T>, T(0));
            }
        return panel;
    }

    // What leads from outputs to an image, by the taps that its phases read by.
    const T *pack_by_phase(const T *from, const Columns<T> &block, Int wide, Int across, Scratch &scratch) const {
        const Int taps = volume(problem.kernel), step = problem.kernel_steps[1];
        T *panel = scratch.panel.reserve(problem.outputs * taps * across + LANES<T>);
        const bool side_by_side = taps == 1 && block.given[wide - 1] - block.given[0] == wide - 1;
        for (Int output = 0; output < problem.outputs; output++, from += step) {
            const bool one = readings.size() == 1;
            T *all = one ? panel + output * taps * across : scratch.taps.reserve(taps * across + LANES<T>);
            if (side_by_side) {
                copy(all, from + block.given[0], wide);
                std::fill(all + wide, all + across, T(0));
            } else {
                transpose_into(all, taps, across, from, block.given, wide);
            }
            T *phase = panel;
            for (const Reading &reading : readings) {
                const Int some = reading.taps.size();
                for (Int k = 0; k < some && !one; k++)
                    copy(phase + (output * some + k) * across, all + reading.taps[k] * across, across);
                phase += problem.outputs * some * across;
            }
        }
        return panel;
    }

    const T *source(const Part &part) const { return wanted == IMAGE ? operands.response(part) : operands.image(part); }

    void read_images(const Part &part, Scratch &scratch) const {
        const Reading &reading = readings[0];
        if (reading.in_place) return;
        const Int plane = reading.plane(), lanes = lanewise ? width : 1;
        if (!scratch.padded) {  // what is around the images stays zero from one item to the next
            const Int count = at_once * reading.channels * plane * lanes + LANES<T>;  // a vector may end behind them
            std::fill_n(scratch.images.reserve(count), count, T(0));
            scratch.padded = true;
        }
        const Int *steps = wanted == IMAGE ? problem.response_steps : problem.image_steps;
        const T *from = source(part);
        if (lanewise) from += part.first_column * steps[2];
        if (from == scratch.read && part.images == scratch.count) return;  // for other columns
        scratch.read = from, scratch.count = part.images;
        T *to = scratch.images.get() + reading.inside() * lanes;
        for (Int n = 0; n < part.images; n++)
            for (Int channel = 0; channel < reading.channels; channel++, to += plane * lanes)
                read_plane(reading, part, from + n * steps[1] + channel * steps[2], steps[2], to, scratch);
    }

    // One channel; or, side by side, as many groups as a vector has lanes.
    void read_plane(
        const Reading &reading, const Part &part, const T *from, Int group_step, T *to, Scratch &scratch) const {
        const Int *size = wanted == IMAGE ? problem.response : problem.image, *padded = reading.padded;
        const Int lanes = lanewise ? width : 1;
        if (lanewise) {
            Int groups[2 * LANES<T>];
            for (Int i = 0; i < lanes; i++) groups[i] = i * group_step;
            T *side_by_side = scratch.plane.reserve(volume(size) * lanes);
            transpose_into(side_by_side, volume(size), lanes, from, groups, part.last_column - part.first_column);
            from = side_by_side;
        }
        for (Int line = 0; line < size[0] * size[1]; line++) {
            const Int at = (line / size[1] * padded[1] + line % size[1]) * padded[2];
            copy(to + at * lanes, from + line * size[2] * lanes, size[2] * lanes);
        }
    }
};

}  // namespace

extern "C" void convmesh_direct_float32(const Problem *problem, Int threads) {
    compute_all(Product<float>(*problem, threads), threads);
}
extern "C" void convmesh_direct_float64(const Problem *problem, Int threads) {
    compute_all(Product<double>(*problem, threads), threads);
}
extern "C" Int convmesh_vector_bytes() { return VECTOR_BYTES; }
