// A small pool of threads that lasts as long as the process: f(worker) runs once on each of n workers, the caller
// being worker 0. A caller that finds the pool busy runs alone: results never depend on how many workers there are.
#pragma once

namespace heedful {

void parallel(int n, void (*f)(void*, int), void* data);

template <class F>
void parallel(int n, F&& f) {
  parallel(n, [](void* data, int worker) { (*(F*)data)(worker); }, (void*)&f);
}

}  // namespace heedful
