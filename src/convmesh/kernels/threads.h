// Threads of the OpenMP library that torch has loaded, by their functions there, which `convmesh_take_threads` is given.
// So no compiler needs an OpenMP of its own, whose threads would be in the way of torch's.
#pragma once

#include "vectors.h"

// As GCC's calls them: LLVM's and Intel's have the same three.
struct Team {
    void (*parallel)(void (*)(void *), void *, unsigned, unsigned);  // GOMP_parallel
    int (*number)();                                                 // omp_get_thread_num
    int (*size)();                                                   // omp_get_num_threads
};
__attribute__((visibility("hidden"))) extern Team team;  // this library's own

// `f(number, size)` by every thread of a team, which may be smaller than asked for.
template <class F> void on_threads(Int threads, const F &f) {
    const auto one = [](void *f) {
        (*static_cast<const F *>(f))(team.number(), team.size());
        finish_writing();
    };
    team.parallel(one, const_cast<F *>(&f), threads, 0);
}

// `f(item)` for every item, neighbours by the same thread.
template <class F> void share(Int items, Int threads, const F &f) {
    on_threads(threads, [&](Int number, Int size) {
        for (Int item = items * number / size; item < items * (number + 1) / size; item++) f(item);
    });
}
