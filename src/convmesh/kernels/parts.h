// How threads share a product: what is computed at a time, and where that lies.
#pragma once

#include <atomic>

#include "reading.h"
#include "threads.h"

// How many samples read the same: their columns are one behind the other, so that it is read once.
inline Int together(const Problem &problem) {
    const Int step = problem.wanted == IMAGE ? problem.response_steps[0] : problem.image_steps[0];
    return step ? 1 : problem.samples;
}

// Some columns of one group, and some images; of one sample, or of all from the first on.
struct Part {
    Int sample, group, first_column, last_column, first_image, images;
};

// Samples and their groups, of which each is a set; or groups alone, of samples together. Where these are few, images or columns are shared, too: what is not
// shared every thread reads for itself, so that goes for whichever has more numbers. Nothing is added up over images
// that are apart.
class Shares {
  public:
    // Of so many columns in a set, which are computed `width` at a time; `apart` if no item may have more of them.
    Shares(const Problem &problem, Int sets, Int groups, Int columns, Int width, bool apart, Int threads)
        : problem(problem), sets(sets), groups(groups), columns(columns), width(width),
          blocks((columns + width - 1) / width) {
        const Int wanted = 2 * threads;
        const Int most_chunks = problem.wanted == KERNEL ? 1 : problem.images;
        const auto enough = [&](Int there) { return (wanted + there - 1) / there; };
        const bool to_image = problem.wanted == IMAGE;
        const Int read = problem.images * volume(to_image ? problem.response : problem.image);
        chunks = !apart && read >= columns * volume(problem.kernel) ? std::min(most_chunks, enough(sets)) : 1;
        parts = apart ? blocks : std::min(blocks, enough(sets * chunks));
        chunks = std::min(most_chunks, std::max(chunks, enough(sets * parts)));
    }

    Int items() const { return sets * parts * chunks; }
    Int images() const { return (problem.images + chunks - 1) / chunks; }  // of an item, at most

    // The first images of an item.
    Part part(Int item, Int at_once) const {
        const Int chunk = item % chunks, number = item / chunks % parts, set = item / chunks / parts;
        const Int first = blocks * number / parts * width, last = blocks * (number + 1) / parts * width;
        const Int image = problem.images * chunk / chunks, stop = problem.images * (chunk + 1) / chunks;
        return {set / groups, set % groups, first, std::min(last, columns), image, std::min(at_once, stop - image)};
    }

    // Those that follow; none after the last of its chunk.
    void next(Part &part, Int item, Int at_once) const {
        part.first_image += part.images;
        part.images = std::min(at_once, problem.images * (item % chunks + 1) / chunks - part.first_image);
    }

  private:
    const Problem &problem;
    const Int sets, groups, columns, width, blocks;
    Int parts, chunks;
};

// Where a part of each operand begins.
template <class T> struct Operands {
    const Problem &problem;

    T *image(const Part &part) const { return within(problem.x, problem.image_steps, problem.inputs, part); }
    T *response(const Part &part) const { return within(problem.y, problem.response_steps, problem.outputs, part); }
    T *kernel(const Part &part) const {
        const Int *steps = problem.kernel_steps;
        return (T *)problem.w + part.sample * steps[0] + part.group * problem.outputs * steps[1];
    }

  private:
    static T *within(void *whole, const Int *steps, Int channels, const Part &part) {
        return (T *)whole + part.sample * steps[0] + part.first_image * steps[1] + part.group * channels * steps[2];
    }
};

// Columns side by side: where they begin in the operand that is given by columns, and in the result; and their biases.
template <class T> class Columns {
  public:
    Int given[2 * LANES<T>], wanted[2 * LANES<T>];

    // From `first` on, of which every sample has `of_sample`; those of an image are `apart` in a kernel.
    Columns(const Problem &problem, const Part &part, Int first, Int count, Int of_sample, Int apart) {
        const Int *kernel = problem.kernel_steps, *response = problem.response_steps, *image = problem.image_steps;
        if (problem.wanted == RESPONSE)
            list(given, first, count, of_sample, kernel[0], kernel[1]);
        else if (problem.wanted == IMAGE)
            list(given, first, count, of_sample, kernel[0], apart);
        else
            list(given, first, count, of_sample, response[0], response[2]);
        if (problem.wanted == KERNEL)
            list(wanted, first, count, of_sample, kernel[0], kernel[1]);
        else if (problem.wanted == IMAGE)
            list(wanted, first, count, of_sample, image[0], image[2]);
        else
            list(wanted, first, count, of_sample, response[0], response[2]);
        if (!problem.bias) return;
        Int places[2 * LANES<T>];
        list(places, first, count, of_sample, problem.bias_step, 1);
        const T *from = (const T *)problem.bias + part.sample * problem.bias_step + part.group * of_sample;
        for (Int i = 0; i < count; i++) biases[i] = from[places[i]];
        bias = biases;
    }
    const T *bias = nullptr;

  private:
    T biases[2 * LANES<T>];

    static void list(Int *places, Int first, Int count, Int of_sample, Int sample_step, Int step) {
        Int sample = first / of_sample, column = first % of_sample;
        for (Int i = 0; i < count; i++) {
            places[i] = sample * sample_step + column * step;
            if (++column == of_sample) sample++, column = 0;
        }
    }
};

struct alignas(64) Taken {
    std::atomic<Int> items{0};
};

// Neighbouring items by the same thread, as torch's own operators share what they read next: their numbers are in its
// core's caches then. Who is done helps the others. `Product::Scratch` is what a thread works in.
template <class Product> void compute_all(const Product &product, Int threads) {
    std::vector<Taken> taken(threads);
    on_threads(threads, [&](Int number, Int size) {
        typename Product::Scratch scratch;
        for (Int other = 0; other < size; other++) {
            const Int of = (number + other) % size, stop = product.items() * (of + 1) / size;
            for (Int item; (item = product.items() * of / size + taken[of].items++) < stop;)
                product.compute(item, scratch);
        }
    });
}
