// The resizable pool, its gate and its registry under threads that do all they can at once, for a sanitizer to watch.
//
// Everything is compiled here with the sanitizer, unlike inside TensorFlow, whose own library is not: the headers under
// `tensorflow/` stand in for what the three files use of it. Usage: stress SECONDS SEED
#include <cstdio>
#include <cstdlib>
#include <future>
#include <random>

#include "registry.h"
#include "runner.h"

using namespace intune;  // NOLINT

namespace {

using Random = std::mt19937;
using std::chrono::steady_clock;

std::atomic<bool> stop{false};
std::atomic<int64_t> scheduled{0}, ran{0}, failures{0};

int Draw(Random& random, int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); }

void Pause(int microseconds) { std::this_thread::sleep_for(std::chrono::microseconds(microseconds)); }

void Expect(bool holds, const char* what) {
  if (holds) return;
  ++failures;
  std::fprintf(stderr, "does not hold: %s\n", what);
}

// TensorFlow's own threads: closures of stages without a limit run here.
class Base : public tensorflow::thread::ThreadPoolInterface {
 public:
  Base() {
    for (int i = 0; i < 3; ++i) threads_.emplace_back([this] { Work(); });
  }
  ~Base() override {
    {
      std::unique_lock<std::mutex> lock(mu_);
      ended_ = true;
    }
    some_.notify_all();
    for (auto& thread : threads_) thread.join();
  }
  void Schedule(Closure fn) override {
    {
      std::unique_lock<std::mutex> lock(mu_);
      queue_.push_back(std::move(fn));
    }
    some_.notify_one();
  }
  int NumThreads() const override { return 3; }
  int CurrentThreadId() const override { return -1; }

 private:
  void Work() {
    std::unique_lock<std::mutex> lock(mu_);
    while (true) {
      some_.wait(lock, [this] { return ended_ || !queue_.empty(); });
      if (queue_.empty()) return;
      Closure fn = std::move(queue_.front());
      queue_.pop_front();
      lock.unlock();
      fn();
      lock.lock();
    }
  }
  std::mutex mu_;
  std::condition_variable some_;
  std::deque<Closure> queue_;
  std::vector<std::thread> threads_;
  bool ended_ = false;
};

// Counts what has been scheduled and not run; its destructor waits, as an iterator's does.
struct Pending {
  std::mutex mu;
  std::condition_variable none;
  int count = 0;
  void Begin() {
    std::unique_lock<std::mutex> lock(mu);
    ++count;
  }
  void End() {
    std::unique_lock<std::mutex> lock(mu);
    if (--count == 0) none.notify_all();
  }
  bool WaitBelow(int most) {
    std::unique_lock<std::mutex> lock(mu);
    return none.wait_for(lock, std::chrono::milliseconds(1), [&] { return count < most; });
  }
  void Drain() {
    std::unique_lock<std::mutex> lock(mu);
    none.wait(lock, [&] { return count == 0; });
  }
};

void Submit(const PoolRunner& runner, Pending* pending, Random* random, int depth) {
  pending->Begin();
  ++scheduled;
  const int parts = depth > 0 && Draw(*random, 0, 9) == 0 ? Draw(*random, 1, 3) : 0;
  const int work_us = Draw(*random, 0, 3) == 0 ? Draw(*random, 1, 300) : 0;
  const bool waits = Draw(*random, 0, 400) == 0;  // for its parts, as a parallel copy does
  const unsigned seed = (*random)();
  auto once = std::make_shared<std::atomic<bool>>(false);
  runner([=, &runner] {
    Expect(!once->exchange(true), "a closure runs once");
    if (work_us > 0) Pause(work_us);
    Random mine(seed);
    Pending inside;
    for (int i = 0; i < parts; ++i) Submit(runner, waits ? &inside : pending, &mine, depth - 1);
    inside.Drain();
    ++ran;
    pending->End();
  });
}

// As an interleave does: one thread schedules those that read, as many as its number is, and those that open ahead.
void Begin(Starter* starter, std::shared_ptr<tensorflow::data::model::SharedState> state, Pending* pending) {
  const auto thread = [pending] {
    ++scheduled;
    pending->Begin();
    return [pending] {
      ++ran;
      pending->End();
    };
  };
  pending->Begin();
  starter->Schedule([=] {
    tensorflow::mutex_lock lock(*state->mu);
    const int readers = static_cast<int>(state->value);
    lock.unlock();
    for (int i = 0; i < readers + 2; ++i) starter->Schedule(thread());
    pending->End();
  });
}

// One tf.data iterator after the other on a stage.
void Iterate(const std::shared_ptr<Stage>& stage, Base* base, unsigned seed) {
  Random random(seed);
  while (!stop) {
    auto owner = std::make_shared<int>(0);
    auto node = std::make_shared<Node>();
    const auto state = node->Parallelism(Draw(random, 1, 9));
    const auto starter = stage->is_interleave() ? std::make_shared<Starter>(base) : nullptr;
    stage->Attach(owner.get(), node, starter);
    Pending pending;
    if (starter) Begin(starter.get(), state, &pending);
    {
      const PoolRunner runner(stage->pool, [base](Closure fn) { base->Schedule(std::move(fn)); }, owner.get(),
                              Draw(random, 0, 1) ? 2 : -1);
      const int items = Draw(random, 1, 400), window = Draw(random, 1, 40);
      for (int i = 0; i < items && !stop; ++i) {
        while (!pending.WaitBelow(window) && !stop) {
        }
        Submit(runner, &pending, &random, 2);
        node->elements++;
        node->buffered = i % 5;
        stage->Passed({tensorflow::Tensor({"short", std::string(40, 'x')})});
        if (stage->follows_depth()) stage->Asked(node.get());
      }
      if (starter) starter->Start();
      stage->Detach(owner.get());
      stage->pool->Hurry(owner.get());
      pending.Drain();
      stage->pool->Gone(owner.get());
    }
  }
}

void Change(const std::shared_ptr<Stage>& stage, bool has_readers, unsigned seed) {
  Random random(seed);
  while (!stop) {
    switch (Draw(random, 0, 6)) {
      case 0:
      case 1:
        stage->pool->SetLimit(Draw(random, 0, 6));
        break;
      case 2:
        stage->SetWindow(Draw(random, 1, 30));
        break;
      case 3:
        if (has_readers) stage->SetReaders(Draw(random, 0, 8), 1);
        break;
      case 4:
        stage->gate.SetLimit(Draw(random, 0, 4));
        break;
      case 5:
        if (!has_readers) stage->FollowDepth();
        break;
      default:
        stage->Read();
        const auto seen = stage->pool->Read();
        Expect(seen.running >= 0 && seen.waiting >= 0 && seen.threads >= 0, "counts are not negative");
        Expect(seen.tally.busy_s >= 0.0 && seen.tally.closures >= 0, "time goes forward");
    }
    Pause(Draw(random, 0, 2000));
  }
}

void Pass(Gate* gate, unsigned seed) {
  Random random(seed);
  tensorflow::CancellationManager cancelled;
  for (int i = 0; !stop; ++i) {
    const bool place = gate->Try() || gate->Enter(Draw(random, 0, 3) ? &cancelled : nullptr);
    if (Draw(random, 0, 7) == 0) Pause(Draw(random, 0, 200));
    if (place) gate->Leave();
    if (i == 5000) cancelled.StartCancel();
  }
  gate->SetLimit(0);
}

void Look(unsigned seed) {
  Random random(seed);
  while (!stop) {
    const std::string name = std::to_string(Draw(random, 0, 3));
    auto found = Registry::Get().Find(name)->Find("stage");
    found->pool->SetLimit(Draw(random, 0, 2));
    if (Draw(random, 0, 2) == 0) Registry::Get().Release(name);
    if (auto known = Registry::Get().Known(name)) known->sink->Asked(0.1, nullptr);
    Pause(50);
  }
}

}  // namespace

int main(int, char** argv) {
  const double seconds = std::atof(argv[1]);
  const unsigned seed = std::atoi(argv[2]);
  std::vector<std::shared_ptr<Stage>> stages;
  {
    Base base;
    std::vector<std::thread> threads;
    for (unsigned s = 0; s < 2; ++s) {
      stages.push_back(Registry::Get().Find("pipeline")->Find(std::to_string(s)));
      stages.back()->pool->SetLimit(2);
      for (unsigned i = 0; i < 2; ++i) {
        threads.emplace_back(Iterate, stages.back(), &base, seed + 10 * s + i);
        threads.emplace_back(Change, stages.back(), s == 0, seed + 100 + 10 * s + i);
        threads.emplace_back(Pass, &stages.back()->gate, seed + 200 + 10 * s + i);
      }
    }
    threads.emplace_back(Look, seed + 300);
    std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
    stop = true;
    for (auto& thread : threads) thread.join();
  }
  Expect(scheduled == ran, "all that was scheduled ran");
  // Threads with nothing to do end by themselves.
  const auto until = steady_clock::now() + std::chrono::seconds(15);
  for (auto& stage : stages) {
    while (stage->pool->Read().threads > 0 && steady_clock::now() < until) Pause(20000);
    Expect(stage->pool->Read().threads == 0, "idle threads end");
  }
  Pause(50000);
  std::printf("%lld closures\n", static_cast<long long>(ran));
  return failures == 0 ? 0 : 1;
}
