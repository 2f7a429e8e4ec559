// What Winograd's algorithm makes of an image: numbers by frequency, tile and channel (tile_transforms.h).
#pragma once

#include "parts.h"
#include "tile_transforms.h"

constexpr Int PAGE_BYTES = 4096;  // numbers so far apart share the lines of a first-level cache

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
};

// At least so many numbers: how far apart frequencies lie, one of each of which is read or written at a time, so that
// these do not share the same few lines of a cache.
template <class T> Int spread(Int numbers) {
    constexpr Int PAGE = PAGE_BYTES / sizeof(T);
    return (numbers + PAGE - 1) / PAGE * PAGE + 2 * LANES<T>;
}

template <class T> struct Numbers {
    const Problem &problem;
    const Grid &grid;
    Int row, frequency;  // how far tiles are apart, and frequencies
    Int some;            // lines of tiles at a time

    // Of `count` lines of tiles of the images' planes, from `first` on.
    void read(const Part &part, Int first, Int count, Buffer<T> &lines_read, T *numbers) const {
        const bool to_image = problem.wanted == IMAGE;
        const Int *steps = to_image ? problem.response_steps : problem.image_steps;
        const Operands<T> operands{problem};
        const T *from = to_image ? operands.response(part) : operands.image(part);
        const Int lines = grid.lines(), line = grid.source[2], stop = first + count;
        // As many numbers as there are in the source lines of some lines of tiles, and a line of zeros.
        T *zeros = lines_read.reserve((RESULTS * some + RESULTS + 1) * line * LANES<T>);
        std::fill_n(zeros, line * LANES<T>, T(0));
        for (Int channel = 0; channel < grid.channels; channel += LANES<T>)
            for (Int next = first, end; next < stop; next = end) {
                const Int number = next / lines, begin = next % lines;
                end = std::min({stop, next + some, (number + 1) * lines});
                const Int n = number / grid.planes(), at = number % grid.planes() - grid.padding[0];
                const bool outside = at < 0 || at >= grid.source[0];
                const T *plane = from + n * steps[1] + channel * steps[2] + at * grid.source[1] * line;
                const Int upper = std::max<Int>(0, RESULTS * begin - grid.padding[1]);
                const Int lower = std::min(grid.source[1], RESULTS * (begin + end - next) + RESULTS - grid.padding[1]);
                if (!outside && lower > upper)
                    read_lines(plane + upper * line, (lower - upper) * line, steps[2], channel, zeros + line * LANES<T>);
                for (Int i = next; i < end; i++) {
                    const T *four[SIDE];
                    for (int h = 0; h < SIDE; h++) {
                        const Int source = RESULTS * (begin + i - next) + h - grid.padding[1];
                        const bool inside = !outside && source >= 0 && source < grid.source[1];
                        four[h] = inside ? zeros + (1 + source - upper) * line * LANES<T> : zeros;
                    }
                    T *to = numbers + (i - first) * grid.across() * row + channel;
                    transform_numbers(four, line, grid.padding[2], grid.across(), to, row, frequency);
                }
            }
    }

  private:
    // As many channels as a vector has lanes, side by side; zeros where there are no more.
    void read_lines(const T *from, Int count, Int channel_step, Int channel, T *to) const {
        Int channels[LANES<T>];
        for (Int i = 0; i < LANES<T>; i++) channels[i] = i * channel_step;
        transpose_into(to, count, LANES<T>, from, channels, std::min(LANES<T>, grid.channels - channel));
    }
};
