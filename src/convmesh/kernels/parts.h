// How threads share a product: what is computed at a time, and where that lies.
#pragma once

#include <atomic>

#include "reading.h"
#include "threads.h"

// Some columns of one group of one sample, and some images.
struct Part {
    Int sample, group, first_column, last_column, first_image, images;
};

// Samples and their groups, of which each is a set. Where these are few, images or columns are shared, too: what is not
// shared every thread reads for itself, so that goes for whichever has more numbers. Nothing is added up over images
// that are apart.
class Shares {
  public:
    // Of so many columns in a group, which are computed `width` at a time; `apart` if no item may have more of them.
    Shares(const Problem &problem, Int groups, Int columns, Int width, bool apart, Int threads)
        : problem(problem), groups(groups), columns(columns), width(width), blocks((columns + width - 1) / width) {
        const Int sets = problem.samples * groups, wanted = 2 * threads;
        const Int most_chunks = problem.wanted == KERNEL ? 1 : problem.images;
        const auto enough = [&](Int there) { return (wanted + there - 1) / there; };
        const bool to_image = problem.wanted == IMAGE;
        const Int read = problem.images * volume(to_image ? problem.response : problem.image);
        chunks = !apart && read >= columns * volume(problem.kernel) ? std::min(most_chunks, enough(sets)) : 1;
        parts = apart ? blocks : std::min(blocks, enough(sets * chunks));
        chunks = std::min(most_chunks, std::max(chunks, enough(sets * parts)));
    }

    Int items() const { return problem.samples * groups * parts * chunks; }
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
    const Int groups, columns, width, blocks;
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
