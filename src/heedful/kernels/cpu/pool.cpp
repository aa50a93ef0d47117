#include "pool.h"

#include <pthread.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#define RELAX() _mm_pause()
#else
#define RELAX() std::this_thread::yield()
#endif

namespace heedful {
namespace {

constexpr int kSpins = 2000;  // some tens of microseconds: the gap between two layers of a model

struct Pool {
  std::mutex owner, sleep;
  std::condition_variable wake;
  std::atomic<uint64_t> job{0};
  std::atomic<int> wanted{0}, running{0};
  void (*f)(void*, int) = nullptr;
  void* data = nullptr;
  int size = 0;
};
// Never destroyed: its workers may outlive main. A forked child starts with a pool of its own.
Pool* pool = new Pool;

void serve(Pool* p, int worker, uint64_t seen) {
  for (;;) {
    for (int i = 0; i < kSpins && p->job.load(std::memory_order_acquire) == seen; i++) RELAX();
    if (p->job.load(std::memory_order_acquire) == seen) {
      std::unique_lock<std::mutex> lock(p->sleep);
      p->wake.wait(lock, [&] { return p->job.load(std::memory_order_acquire) != seen; });
    }
    seen = p->job.load(std::memory_order_acquire);
    if (worker < p->wanted.load(std::memory_order_relaxed)) p->f(p->data, worker);
    p->running.fetch_sub(1, std::memory_order_release);
  }
}

void grow(Pool* p, int n) {
  for (; p->size < n - 1; p->size++) {
    try {
      std::thread(serve, p, p->size + 1, p->job.load()).detach();
    } catch (const std::system_error&) {
      return;  // no room for one more: those that are here do the work
    }
  }
}

void forget_pool() { pool = new Pool; }
const int at_fork = pthread_atfork(nullptr, nullptr, forget_pool);

}  // namespace

void parallel(int n, void (*f)(void*, int), void* data) {
  Pool* p = pool;
  std::unique_lock<std::mutex> mine(p->owner, std::defer_lock);
  if (n <= 1 || !mine.try_lock()) return f(data, 0);
  grow(p, n);
  p->f = f;
  p->data = data;
  p->wanted.store(n, std::memory_order_relaxed);
  p->running.store(p->size, std::memory_order_relaxed);
  {
    std::lock_guard<std::mutex> lock(p->sleep);
    p->job.fetch_add(1, std::memory_order_release);
  }
  p->wake.notify_all();
  f(data, 0);
  for (int spins = 0; p->running.load(std::memory_order_acquire); spins++)
    if (spins < kSpins) RELAX();
    else std::this_thread::yield();
}

}  // namespace heedful
