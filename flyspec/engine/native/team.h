// Threads that share the work of a step with the calling one, which depends on none of them.
//
// A helper runs at idle priority: it works where nothing else wants a core, and anything that
// wakes up preempts it. It keeps its results until the calling thread collects them; if a result
// is late, the calling thread computes that unit itself. So a helper may still be working on a unit
// that is long over: its result is ignored, and what it reads may be anything by then.
#include <immintrin.h>
#include <sched.h>
#include <atomic>
#include <cstring>
#include <deque>
#include <thread>
#include <type_traits>
#include <vector>

struct alignas(64) Line { char bytes[64]; };
template <class T> struct Block : std::vector<Line> {  // zeroed, aligned
  T* const p;
  explicit Block(size_t n) : std::vector<Line>(n * sizeof(T) / 64 + 1), p((T*)data()) {}
};
// `Room` is a thread's own working memory; a helper enters its own.
template <class Room> class Team {
  static constexpr int SPINS = 2000;     // before a helper without work goes to sleep: about 50 us
  static constexpr uint32_t AHEAD = 16;  // maximum results that a helper keeps
  struct Job {
    void (*run)(const char* work, Room& room, int unit, float* to);
    int count;
    alignas(16) char work[80];
  };
  struct Kept { uint32_t job; int unit; };
  struct Helper {
    Block<float> results;
    Kept kept[AHEAD];
    std::atomic<uint32_t> made{0}, taken{0};
    std::thread thread;
    explicit Helper(size_t size) : results(AHEAD * size) {}
  };
  const size_t size;  // of a unit's result
  const size_t length;
  Room room;
  Block<float> result;
  std::deque<Helper> helpers;
  Job job;
  std::atomic<uint64_t> next{0};  // job number << 32 | next unit; number is odd during a write
  std::atomic<int> go{0};
  std::atomic<bool> asleep{false}, quit{false};
  std::vector<char> done;  // by unit of the job

  void help(Helper& h) {
    const sched_param none{};
    sched_setscheduler(0, SCHED_IDLE, &none);
    Room own_room(length);
    own_room.enter();
    for (uint32_t over = 0; !quit;) {
      const int seen = go;
      uint64_t at = next;
      for (int i = 0; i < SPINS && (at >> 32 == over || at >> 32 & 1); i++) _mm_pause(), at = next;
      const uint32_t number = at >> 32;
      if (number == over || number & 1) {
        asleep = true;
        go.wait(seen);
        continue;
      }
      const Job own = job;  // consistent if a unit of the same number can be claimed afterwards
      std::atomic_thread_fence(std::memory_order_acquire);
      while ((at = next) >> 32 == number && (int)at < own.count && !quit) {
        const uint32_t made = h.made, place = made % AHEAD;
        if (made - h.taken == AHEAD || !next.compare_exchange_weak(at, at + 1)) {
          _mm_pause();
          continue;
        }
        own.run(own.work, own_room, (int)at, h.results.p + place * size);
        h.kept[place] = {number, (int)at};
        h.made = made + 1;
      }
      over = number;
    }
  }

 public:
  // `most`: numbers in the result of a unit done alone; `size`: of one that a helper may do.
  Team(int num_helpers, size_t most, size_t size, size_t length)
      : size(size), length(length), room(length), result(most) {
    for (int i = 0; i < num_helpers; i++) {
      Helper& h = helpers.emplace_back(size);
      h.thread = std::thread([this, &h] { help(h); });
    }
  }
  ~Team() {
    quit = true, go++, go.notify_all();
    for (Helper& h : helpers) h.thread.join();
  }
  // Runs work(room, unit, to) for all units, and calls take(unit, from) in this thread with each
  // result. `work` is copied and may still run when the job is over: it must write nowhere else,
  // and must tolerate reading half-written data of later jobs.
  template <class Do, class Take> void share(bool alone, int count, Do work, Take take) {
    static_assert(sizeof(Do) <= sizeof(Job::work) && std::is_trivially_copyable_v<Do>);
    if (alone || helpers.empty() || count < 2) {
      for (int i = 0; i < count; i++) work(room, i, result.p), take(i, result.p);
      return;
    }
    int left = count, own = 0;
    done.assign(count, false);
    const uint32_t number = (next >> 32) + 2;
    auto finish = [&](int i, const float* from) { take(i, from), done[i] = true, left--; };
    auto collect = [&] {
      for (Helper& h : helpers)
        for (uint32_t at; (at = h.taken) != h.made; h.taken = at + 1) {
          const Kept kept = h.kept[at % AHEAD];
          if (kept.job == number && !done[kept.unit])
            finish(kept.unit, h.results.p + at % AHEAD * size);
        }
    };
    next = (uint64_t)(number - 1) << 32;
    job.run = [](const char* w, Room& r, int i, float* to) { (*(const Do*)w)(r, i, to); };
    job.count = count;
    memcpy(job.work, (const char*)&work, sizeof work);
    next = (uint64_t)number << 32;
    if (asleep && asleep.exchange(false)) go++, go.notify_all();  // once: it can be slow
    const uint64_t began = __rdtsc();
    for (int i; (i = (int)next++) < count; own++) {
      work(room, i, result.p), finish(i, result.p);
      collect();
    }
    // A helper needs no longer for a unit than this thread would, unless it was preempted.
    const uint64_t now = __rdtsc(), until = now + (own ? (now - began) / own : 0);
    while (left && __rdtsc() < until) collect(), _mm_pause();
    for (int i = 0; left; i++)
      if (!done[i]) work(room, i, result.p), finish(i, result.p);
  }
};
