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

template <class T> class Product {
  public:
    struct Scratch {
        Buffer<T> images, plane, panel, sums;
        bool padded = false;
    };

    Product(const Problem &problem, Int threads)
        : problem(problem), wanted(Wanted(problem.wanted)), lanewise(problem.inputs == 1 && problem.outputs == 1),
          columns(lanewise ? problem.groups : wanted == IMAGE ? problem.inputs : problem.outputs),
          width(!lanewise && columns > LANES<T> ? 2 * LANES<T> : LANES<T>),
          shares(problem, lanewise ? 1 : problem.groups, columns, width, lanewise, threads), operands{problem} {
        const Int channels = lanewise ? width : wanted == IMAGE ? problem.outputs : problem.inputs;
        const Int bytes = volume(wanted == IMAGE ? problem.response : problem.image) * channels * sizeof(T);
        at_once = std::clamp<Int>(IMAGES_BYTES / bytes, 1, shares.images());
        for (Int phase = 0; phase < (wanted == IMAGE ? volume(problem.stride) : 1); phase++)
            readings.emplace_back(problem, at_once, phase, LANES<T>);
    }

    Int items() const { return shares.items(); }

    void compute(Int item, Scratch &scratch) const {
        for (Part part = shares.part(item, at_once); part.images > 0; shares.next(part, item, at_once)) {
            read_images(readings[0], part, scratch);
            for (const Reading &reading : readings) compute(reading, part, scratch);
        }
    }

  private:
    const Problem &problem;
    const Wanted wanted;
    const bool lanewise;
    const Int columns, width;
    const Shares shares;
    const Operands<T> operands;
    Int at_once;
    std::vector<Reading> readings;  // one for each phase, all of the same padded images

    Int places_of_image(const Reading &reading) const { return reading.places.size() / at_once; }

    void compute(const Reading &reading, const Part &part, Scratch &scratch) const {
        const Int places = places_of_image(reading) * part.images, shifts = reading.shifts.size();
        const bool few = is_few(reading);
        T *sums = scratch.sums.reserve(ROWS * width);
        const Int deep = wanted != KERNEL ? shifts : few ? Int(reading.pieces.size()) * LANES<T> : places;
        T *panel = scratch.panel.reserve(deep * width);
        const int32_t *place = reading.places.data(), *shift = reading.shifts.data();
        Factors<T> factors{scratch.images.get(), place, places, shift, shifts, panel};
        if (wanted == KERNEL) factors = {scratch.images.get(), shift, shifts, place, places, panel};
        for (Int column = part.first_column; column < part.last_column; column += width) {
            const Int wide = std::min(width, columns - column);
            const Int across = few ? wide : wide <= LANES<T> ? LANES<T> : width;
            pack(reading, part, column, wide, across, panel);
            const Target<T> target = target_of(reading, part, column);
            if (few)
                multiply_by_pieces(factors, reading, part, sums, target);
            else if (lanewise)
                multiply<T, LANEWISE>(factors, sums, wide, target);
            else if (across == LANES<T>)
                multiply<T, NARROW>(factors, sums, wide, target);
            else
                multiply<T, WIDE>(factors, sums, wide, target);
        }
    }

    bool is_few(const Reading &reading) const {
        const bool few = columns <= std::min(FEW, LANES<T> / 2), long_enough = reading.run >= LANES<T> / 2;
        return !lanewise && few && long_enough;
    }

    template <int COLUMNS = FEW>
    void multiply_by_pieces(
        const Factors<T> &factors, const Reading &reading, const Part &part, T *sums, const Target<T> &target) const {
        if constexpr (COLUMNS > 0) {
            if (columns < COLUMNS) return multiply_by_pieces<COLUMNS - 1>(factors, reading, part, sums, target);
            const Int count = reading.pieces.size() / at_once * part.images;
            if (wanted == KERNEL)
                multiply_few_dots<T, COLUMNS>(factors, reading.pieces.data(), count, sums, target);
            else
                multiply_few<T, COLUMNS>(factors, reading.pieces.data(), count, sums, target);
        }
    }

    Target<T> target_of(const Reading &reading, const Part &part, Int column) const {
        if (wanted == KERNEL) {
            const Int step = problem.kernel_steps[1], rows = reading.shifts.size();
            return {
                operands.kernel(part) + column * step, 0, step, rows, nullptr, nullptr, part.first_image > 0,
                past_caches<T>(problem)};
        }
        const Int *steps = wanted == IMAGE ? problem.image_steps : problem.response_steps;
        T *start = (wanted == IMAGE ? operands.image(part) : operands.response(part)) + column * steps[2];
        const T *bias = (const T *)problem.bias;
        if (bias) bias += part.sample * problem.bias_step + (lanewise ? 0 : part.group * columns) + column;
        const Int *scattered = reading.targets.empty() ? nullptr : reading.targets.data();
        return {start, steps[1], steps[2], places_of_image(reading), scattered, bias, false, false};
    }

    // Columns from `column` on, `wide` of them, as a panel that is `across` wide.
    void pack(const Reading &reading, const Part &part, Int column, Int wide, Int across, T *panel) const {
        const Int taps = volume(problem.kernel), step = problem.kernel_steps[1], *steps = problem.response_steps;
        if (wanted == KERNEL && is_few(reading)) {
            const T *from = operands.response(part) + column * steps[2];
            const Int count = reading.pieces.size() / at_once * part.images;
            for (const Piece *piece = reading.pieces.data(), *last = piece + count; piece < last; piece++)
                for (Int c = 0; c < wide; c++, panel += LANES<T>) {
                    copy(panel, from + piece->image * steps[1] + c * steps[2] + piece->first, piece->count);
                    std::fill(panel + piece->count, panel + LANES<T>, T(0));
                }
        } else if (wanted == KERNEL) {
            const Int places = places_of_image(reading);
            const T *from = operands.response(part) + column * steps[2];
            for (Int n = 0; n < part.images; n++)
                transpose_into(panel + n * places * across, places, across, from + n * steps[1], steps[2], wide);
        } else if (wanted == RESPONSE) {
            transpose_into(panel, problem.inputs * taps, across, operands.kernel(part) + column * step, step, wide);
        } else {
            const Int some = reading.taps.size(), apart = lanewise ? step : taps;
            for (Int output = 0; output < problem.outputs; output++, panel += some * across) {
                const T *from = operands.kernel(part) + output * step + column * apart;
                if (some == taps)
                    transpose_into(panel, taps, across, from, apart, wide);
                else
                    for (Int k = 0; k < some; k++)
                        for (Int c = 0; c < across; c++)
                            panel[k * across + c] = c < wide ? from[c * apart + reading.taps[k]] : T(0);
            }
        }
    }

    void read_images(const Reading &reading, const Part &part, Scratch &scratch) const {
        const Int plane = reading.plane(), lanes = lanewise ? width : 1;
        if (!scratch.padded) {  // what is around the images stays zero from one item to the next
            const Int count = at_once * reading.channels * plane * lanes + LANES<T>;  // a vector may end behind them
            std::fill_n(scratch.images.reserve(count), count, T(0));
            scratch.padded = true;
        }
        const Int *steps = wanted == IMAGE ? problem.response_steps : problem.image_steps;
        const T *from = wanted == IMAGE ? operands.response(part) : operands.image(part);
        if (lanewise) from += part.first_column * steps[2];
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
            T *side_by_side = scratch.plane.reserve(volume(size) * lanes);
            transpose_into(side_by_side, volume(size), lanes, from, group_step, part.last_column - part.first_column);
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
