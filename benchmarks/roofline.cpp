// What this machine can do at most, measured: sequential reading, multiply-add, bf16 dot products, and bf16 products of
// AMX tiles. Each function
// gives a rate over `threads` threads at once: of wall time, or of CPU time where one thread runs.
#include <stdint.h>
#include <time.h>
#ifdef __AMX_BF16__
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <thread>
#include <vector>

namespace {

double seconds(clockid_t clock) {
  timespec t;
  clock_gettime(clock, &t);
  return double(t.tv_sec) + 1e-9 * double(t.tv_nsec);
}

template <class F>
double timed(int threads, F f) {
  const clockid_t clock = threads == 1 ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC;
  const double began = seconds(clock);
  std::vector<std::thread> others;
  for (int i = 1; i < threads; i++) others.emplace_back(f, i);
  f(0);
  for (std::thread& t : others) t.join();
  return seconds(clock) - began;
}

typedef uint64_t Line __attribute__((vector_size(64)));

Line sum(const Line* p, int64_t lines) {
  Line s[8] = {};
  for (int64_t i = 0; i + 8 <= lines; i += 8)
    for (int j = 0; j < 8; j++) s[j] += p[i + j];
  return ((s[0] + s[1]) + (s[2] + s[3])) + ((s[4] + s[5]) + (s[6] + s[7]));
}

#if defined(__AVX512F__)
#define WIDE "zmm"
constexpr double kLanes = 16;
#elif defined(__AVX2__) && defined(__FMA__)
#define WIDE "ymm"
constexpr double kLanes = 8;
#endif

// Twelve independent chains hide the latency; nothing that a compiler could take out.
#define STEP(op, r) op " %%" WIDE "0,%%" WIDE "1,%%" WIDE #r "\n"
#define CHAINS(op)                                                                                                 \
  asm volatile("1:\n" STEP(op, 2) STEP(op, 3) STEP(op, 4) STEP(op, 5) STEP(op, 6) STEP(op, 7) STEP(op, 8)            \
                   STEP(op, 9) STEP(op, 10) STEP(op, 11) STEP(op, 12) STEP(op, 13) "dec %0\njnz 1b\n"                \
               : "+r"(n)::"xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10",    \
               "xmm11", "xmm12", "xmm13", "cc")

}  // namespace

extern "C" {

// GB/s of reading bytes at p (64-byte aligned) `passes` times, each thread its own share.
double read_rate(const char* p, int64_t bytes, int threads, int passes) {
  const int64_t share = bytes / threads / 512 * 512;
  std::vector<Line> sums(threads);
  const double took = timed(threads, [&](int i) {
    for (int pass = 0; pass < passes; pass++) {
      Line s = sum((const Line*)(p + i * share), share / 64);
      asm volatile("" : : "m"(s) : "memory");
      sums[i] += s;
    }
  });
  return 1e-9 * double(share) * threads * passes / took;
}

// GFLOP/s of fp32 multiply-add; 0 where this machine's instruction set is not known here.
double fma_rate(int threads, int64_t rounds) {
#ifdef WIDE
  const double took = timed(threads, [&](int) {
    int64_t n = rounds;
    CHAINS("vfmadd231ps");
  });
  return 1e-9 * 12 * 2 * kLanes * double(rounds) * threads / took;
#else
  return 0 * threads * double(rounds);
#endif
}

// GFLOP/s of bf16 dot products accumulated in fp32; 0 where the machine has none.
double dot_rate(int threads, int64_t rounds) {
#ifdef __AVX512BF16__
  const double took = timed(threads, [&](int) {
    int64_t n = rounds;
    CHAINS("vdpbf16ps");
  });
  return 1e-9 * 12 * 4 * kLanes * double(rounds) * threads / took;
#else
  return 0 * threads * double(rounds);
#endif
}

// GFLOP/s of bf16 products of AMX tiles accumulated in fp32, nothing loaded; 0 where the machine has none.
double tile_rate(int threads, int64_t rounds) {
#ifdef __AMX_BF16__
  if (syscall(SYS_arch_prctl, 0x1023, 18)) return 0;  // ask the kernel for tile registers
  const double took = timed(threads, [&](int) {
    struct __attribute__((packed)) {
      uint8_t palette = 1, start = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } shape;
    asm volatile("ldtilecfg %0" ::"m"(shape));
    for (int64_t n = rounds; n; n--)
      asm volatile("tdpbf16ps %tmm6,%tmm4,%tmm0\ntdpbf16ps %tmm7,%tmm4,%tmm1\n"
                   "tdpbf16ps %tmm6,%tmm5,%tmm2\ntdpbf16ps %tmm7,%tmm5,%tmm3");
    asm volatile("tilerelease");
  });
  return 1e-9 * 4 * 2 * 16 * 16 * 32 * double(rounds) * threads / took;
#else
  return 0 * threads * double(rounds);
#endif
}
}
