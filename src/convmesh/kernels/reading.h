// What a product reads: which numbers of a padded image, or response, belong together.
#pragma once

#include <algorithm>
#include <vector>

#include "register_tiles.h"

constexpr int DIMS = 3;  // one or two of them may have the size 1
enum Wanted { RESPONSE, IMAGE, KERNEL };

// An image x [B N C *], a kernel w [B O c *] and a response y [B N O *], two of which are given. A step is how far
// apart neighbours along a dimension lie, and 0 where all samples have the same. Spatial dimensions are dense.
struct Problem {
    Int wanted, samples, groups, images;
    Int inputs, outputs;  // of one group
    Int image[DIMS], kernel[DIMS], response[DIMS], stride[DIMS], padding[DIMS], dilation[DIMS];
    Int image_steps[3], kernel_steps[2], response_steps[3];
    Int bias_step;
    void *x, *w, *y, *bias;
};

inline Int volume(const Int *sizes) { return sizes[0] * sizes[1] * sizes[2]; }

// Whether a group has one column: groups are side by side then, in the lanes of vectors, each with a source of its own.
inline bool is_lanewise(const Problem &problem) { return problem.inputs == 1 && problem.outputs == 1; }

// Along one dimension: every place of the result reads the source at `place * stride + shift`, for the shifts of some
// taps, when the source has `before` zeros in front of it and is `padded` long.
struct Axis {
    Int before, padded, places, stride;
    std::vector<Int> taps, shifts;
};

// A response reads the image, and so does the kernel.
inline Axis reading_image(const Problem &problem, int dim) {
    const Int stride = problem.stride[dim], dilation = problem.dilation[dim], padding = problem.padding[dim];
    Axis axis{padding, problem.image[dim] + 2 * padding, problem.response[dim], stride, {}, {}};
    for (Int tap = 0; tap < problem.kernel[dim]; tap++) axis.taps.push_back(tap), axis.shifts.push_back(tap * dilation);
    return axis;
}

// An image reads the response: every `stride`-th index from `phase` on reads by the same taps. What is around the
// response is enough for all phases.
inline Axis reading_response(const Problem &problem, int dim, Int phase) {
    const Int stride = problem.stride[dim];
    Axis axis{0, 0, 0, 1, {}, {}};
    Int after = problem.response[dim];
    for (Int first = 0; first < stride; first++) {
        const Int places = (problem.image[dim] - first + stride - 1) / stride;
        if (first == phase) axis.places = places;
        for (Int tap = 0; tap < problem.kernel[dim]; tap++) {
            const Int distance = first + problem.padding[dim] - tap * problem.dilation[dim];
            if (distance % stride) continue;
            axis.before = std::max(axis.before, -distance / stride);
            after = std::max(after, distance / stride + places);
            if (first == phase) axis.taps.push_back(tap), axis.shifts.push_back(distance / stride);
        }
    }
    axis.padded = axis.before + after;
    for (Int &shift : axis.shifts) shift += axis.before;
    return axis;
}

// Offsets into padded images that lie one behind the other: a place of the result and a shift add up.
struct Reading {
    Int channels, before[DIMS], padded[DIMS];
    Int image_step, channel_step;  // of what is read
    bool in_place;                 // which is the operand itself, whose places all lie side by side
    Int run;                       // so many places lie, and read, side by side; 1 if they do not
    std::vector<int32_t> places;  // of as many results as there are images at a time
    std::vector<int32_t> shifts;  // of all channels and taps
    std::vector<Piece> pieces;    // all places, a vector at a time
    std::vector<Int> taps;        // of the kernel, of one channel's shifts
    std::vector<Int> targets;     // where in an image each place is written, if not one after the other

    Int plane() const { return volume(padded); }
    Int inside() const { return offset(before[0], before[1], before[2]); }  // where an image begins in its plane

    Reading(const Problem &problem, Int images, Int phase, Int lanes) {
        const bool to_image = problem.wanted == IMAGE;
        channels = to_image ? problem.outputs : problem.inputs;
        Int phases[DIMS] = {0, 0, 0};
        Axis axes[DIMS];
        for (int dim = DIMS - 1; dim >= 0; dim--) {
            if (to_image) phases[dim] = phase % problem.stride[dim], phase /= problem.stride[dim];
            axes[dim] = to_image ? reading_response(problem, dim, phases[dim]) : reading_image(problem, dim);
            before[dim] = axes[dim].before, padded[dim] = axes[dim].padded;
        }
        const Int *steps = to_image ? problem.response_steps : problem.image_steps;
        in_place = problem.wanted != KERNEL && !is_lanewise(problem) && volume(problem.kernel) * volume(problem.stride) == 1 &&
                   plane() == volume(problem.image) && plane() >= lanes &&
                   std::max(images * steps[1], channels * steps[2]) < INT32_MAX / 2;
        image_step = in_place ? steps[1] : channels * plane(), channel_step = in_place ? steps[2] : plane();
        run = in_place ? plane() : axes[2].stride == 1 ? axes[2].places : 1;
        list_places(axes, images);
        list_shifts(problem, axes);
        list_pieces(images, lanes);
        if (to_image && volume(problem.stride) > 1) list_targets(problem, axes, phases);
    }

  private:
    void list_places(const Axis *axes, Int images) {
        for (Int image = 0; image < images; image++)
            for (Int d = 0; d < axes[0].places; d++)
                for (Int h = 0; h < axes[1].places; h++)
                    for (Int w = 0; w < axes[2].places; w++)
                        places.push_back(
                            image * image_step +
                            offset(d * axes[0].stride, h * axes[1].stride, w * axes[2].stride));
    }

    void list_pieces(Int images, Int lanes) {
        const Int of_image = places.size() / images;
        for (Int line = 0; line < Int(places.size()); line += run)
            for (Int next = 0; next < run; next += lanes) {
                // Nothing is read behind an operand: some places twice.
                const Int at = in_place ? std::min(next, run - lanes) : next;
                const Int image = line / of_image, first = line % of_image + at, count = std::min(lanes, run - at);
                pieces.push_back({places[line + at], int32_t(image), int32_t(first), int32_t(count)});
            }
    }

    void list_shifts(const Problem &problem, const Axis *axes) {
        for (Int d : axes[0].taps)
            for (Int h : axes[1].taps)
                for (Int w : axes[2].taps) taps.push_back((d * problem.kernel[1] + h) * problem.kernel[2] + w);
        for (Int channel = 0; channel < channels; channel++)
            for (Int d : axes[0].shifts)
                for (Int h : axes[1].shifts)
                    for (Int w : axes[2].shifts) shifts.push_back(channel * channel_step + offset(d, h, w));
    }

    void list_targets(const Problem &problem, const Axis *axes, const Int *phases) {
        const Int *image = problem.image, *stride = problem.stride;
        for (Int d = 0; d < axes[0].places; d++)
            for (Int h = 0; h < axes[1].places; h++)
                for (Int w = 0; w < axes[2].places; w++) {
                    const Int line = (phases[0] + d * stride[0]) * image[1] + phases[1] + h * stride[1];
                    targets.push_back(line * image[2] + phases[2] + w * stride[2]);
                }
    }

    Int offset(Int d, Int h, Int w) const { return (d * padded[1] + h) * padded[2] + w; }
};
