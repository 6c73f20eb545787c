// IntuneStage: what stands behind a stage, inside an interleave's function, or before an interleave.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "pass_through.h"

namespace intune {

// What a thread of an interleave reads: told to the pool's counters now and then, and at once when it took long.
class ReaderClock {
 public:
  static ReaderClock& Mine(const Pool* pool) {
    static thread_local ReaderClock clock;
    if (clock.pool_ != pool) clock = ReaderClock(pool);
    return clock;
  }

  void Add(Pool* pool, double busy_s) {
    ++read_.closures;
    read_.busy_s += busy_s;
    read_.busy_s2 += busy_s * busy_s;
    if (busy_s < kLong_s && read_.closures < kMost) return;
    // What the interleave itself did in between is a little, and is never more than was read.
    const double cpu_s = Seconds(CLOCK_THREAD_CPUTIME_ID);
    read_.cpu_s = std::min(cpu_s - cpu_s_, read_.busy_s);
    cpu_s_ = cpu_s;
    pool->Add(read_);
    read_ = Tally();
  }

 private:
  static constexpr double kLong_s = 50e-6;
  static constexpr int64_t kMost = 32;

  explicit ReaderClock(const Pool* pool = nullptr) : pool_(pool), cpu_s_(Seconds(CLOCK_THREAD_CPUTIME_ID)) {}

  const Pool* pool_;
  double cpu_s_;
  Tally read_;
};

class StageDataset : public PassThrough {
 public:
  StageDataset(OpKernelContext* ctx, const DatasetBase* input, std::string pipeline, std::string stage, int64_t role)
      : PassThrough(ctx, input), pipeline_(std::move(pipeline)), stage_(std::move(stage)), role_(role) {}
  std::string DebugString() const override { return "IntuneStage::Dataset"; }

 protected:
  std::unique_ptr<IteratorBase> MakeIteratorInternal(const std::string& prefix) const override {
    if (role_ == kBehind) return std::make_unique<Behind>(this, prefix);
    if (role_ == kInside) return std::make_unique<Inside>(this, prefix);
    return std::make_unique<Feeding>(Feeding::Params{this, prefix});
  }
  absl::Status AsGraphDefInternal(SerializationContext* ctx, DatasetGraphDefBuilder* b,
                                  ::tensorflow::Node** output) const override {
    return Serialize(ctx, b, {{kPipeline, Attr(b, pipeline_)}, {kStage, Attr(b, stage_)}, {kRole, Attr(b, role_)}},
                     output);
  }

 private:
  // The sink, whose iterator is made first, has made the pipeline known. Nobody would release once more what an
  // iterator made known that goes on behind the release: what it opens from then on is no stage of ours.
  std::shared_ptr<Stage> Find() const {
    const auto known = stage_.empty() ? nullptr : Registry::Get().Known(pipeline_);
    return known ? known->Find(stage_) : nullptr;
  }

  // Each element comes by here: what `DatasetBaseIterator` does for one costs as much as a small function, so this is
  // none of those, and has no node in tf.data's model either. For the model and its tuner the pipeline is the stock one.
  class Bare : public IteratorBase {
   public:
    Bare(const StageDataset* dataset, std::string prefix) : dataset_(dataset), prefix_(std::move(prefix)) {
      dataset_->Ref();
    }

    ~Bare() override {
      input_.reset();
      if (is_bypassed_) node_ = nullptr;  // which is not ours to be removed from the model
      dataset_->Unref();
    }

    const DataTypeVector& output_dtypes() const override { return dataset_->output_dtypes(); }
    const std::vector<PartialTensorShape>& output_shapes() const override { return dataset_->output_shapes(); }
    const std::string& prefix() const override { return prefix_; }
    bool SymbolicCheckpointCompatible() const override { return true; }

    absl::Status Initialize(IteratorContext* ctx) override {
      stage_ = dataset_->Find();
      if (node_ != nullptr && reader_ != nullptr) {
        ctx->model()->RemoveNode(node_);
        node_ = reader_;  // the input's node becomes an input of that one
        is_bypassed_ = true;
      }
      TF_RETURN_IF_ERROR(WithRunner(ctx, Equips(), this, [&](IteratorContext* mine) { return MakeInput(mine); }));
      input_node_ = (input_.get()->*&PeekIterator::model_node)();
      return absl::OkStatus();
    }

    absl::Status Skip(IteratorContext* ctx, int wanted, bool* end, int* skipped) override {
      return WithRunner(ctx, Equips(), this, [&](IteratorContext* mine) {
        return input_->Skip(mine, wanted, end, skipped);
      });
    }

   protected:
    // The stage whose runner the input gets, null for the one below all of ours.
    virtual const Stage* Equips() const { return nullptr; }

    virtual absl::Status MakeInput(IteratorContext* ctx) {
      return dataset_->input()->MakeIterator(ctx, this, prefix(), &input_);
    }

    std::shared_ptr<model::Node> CreateNode(IteratorContext* ctx, model::Node::Args args) const override {
      reader_ = args.output;
      return model::MakeKnownRatioNode(std::move(args), /*ratio=*/1);
    }
    absl::Status SaveInternal(SerializationContext* ctx, IteratorStateWriter* writer) override {
      return SaveInput(ctx, writer, input_);
    }
    absl::Status RestoreInternal(IteratorContext* ctx, IteratorStateReader* reader) override {
      return WithRunner(ctx, Equips(), this, [&](IteratorContext* mine) {
        return RestoreInput(mine, reader, input_);
      });
    }

    std::shared_ptr<Stage> stage_;
    std::unique_ptr<IteratorBase> input_;
    std::shared_ptr<model::Node> input_node_;
    mutable std::shared_ptr<model::Node> reader_;  // of the iterator that reads from this one
    bool is_bypassed_ = false;
    Unequipped unequipped_;

   private:
    struct PeekIterator : IteratorBase {
      using IteratorBase::model_node;
    };

    const StageDataset* const dataset_;
    const std::string prefix_;
  };

  // Right behind a stage, or behind another dataset that computes.
  class Behind : public Bare {
   public:
    using Bare::Bare;

    ~Behind() override {
      if (starter_) starter_->Start();  // the iterator waits for all its threads
      if (stage_) {
        stage_->Detach(this);
        stage_->pool->Hurry(this);
      }
      input_.reset();  // waits for the closures that are still queued
      if (stage_) stage_->pool->Gone(this);
    }

    absl::Status Initialize(IteratorContext* ctx) override {
      TF_RETURN_IF_ERROR(Bare::Initialize(ctx));
      if (stage_) stage_->Attach(this, input_node_, starter_);
      return absl::OkStatus();
    }

    absl::Status GetNext(IteratorContext* ctx, std::vector<Tensor>* element, bool* end) override {
      if (!stage_) return unequipped_.GetNext(input_.get(), ctx, element, end);
      if (stage_->follows_depth()) stage_->Asked(input_node_.get());
      // The stage keeps the runner it found in the first context, for the threads it starts then.
      if (equipped_.load(std::memory_order_acquire)) {
        TF_RETURN_IF_ERROR(input_->GetNext(ctx, element, end));
      } else {
        TF_RETURN_IF_ERROR(WithRunner(ctx, stage_.get(), this, [&](IteratorContext* mine) {
          return input_->GetNext(mine, element, end);
        }));
        equipped_.store(true, std::memory_order_release);
      }
      if (!*end) stage_->Passed(*element);
      return absl::OkStatus();
    }

    absl::Status Skip(IteratorContext* ctx, int wanted, bool* end, int* skipped) override {
      TF_RETURN_IF_ERROR(Bare::Skip(ctx, wanted, end, skipped));
      if (stage_) stage_->Skipped(*skipped);
      return absl::OkStatus();
    }

   protected:
    const Stage* Equips() const override { return stage_.get(); }

    absl::Status MakeInput(IteratorContext* ctx) override {
      // With a warm start the threads are there before it is known how many are wanted.
      const bool is_ours = stage_ && stage_->is_interleave() && ctx->thread_pool() != nullptr && !ctx->warm_start();
      if (!is_ours) return Bare::MakeInput(ctx);
      starter_ = std::make_shared<Starter>(ctx->thread_pool());
      IteratorContext mine = OnPool(ctx, starter_.get());
      TF_RETURN_IF_ERROR(Bare::MakeInput(&mine));
      ctx->MergeCheckpoint(mine.checkpoint());
      return absl::OkStatus();
    }

    // It waits for all its threads, also for those that have not begun.
    absl::Status SaveInternal(SerializationContext* ctx, IteratorStateWriter* writer) override {
      if (starter_) stage_->Start(stage_->threads());
      return Bare::SaveInternal(ctx, writer);
    }

   private:
    std::atomic<bool> equipped_{false};
    std::shared_ptr<Starter> starter_;  // of an interleave's threads
  };

  // One of the datasets an interleave's function makes.
  class Inside : public Bare {
   public:
    using Bare::Bare;

    absl::Status Initialize(IteratorContext* ctx) override {
      TF_RETURN_IF_ERROR(Bare::Initialize(ctx));
      // The interleave switches off, and on again, the node of what it opens ahead.
      if (is_bypassed_) node_ = input_node_;
      return absl::OkStatus();
    }

    // By one of the interleave's threads. Those that open files ahead are not counted by the interleave's own number
    // either: they read the first few elements, which tf.data's model leaves aside.
    absl::Status GetNext(IteratorContext* ctx, std::vector<Tensor>* element, bool* end) override {
      if (!stage_) return unequipped_.GetNext(input_.get(), ctx, element, end);
      Gate& gate = stage_->gate;
      bool place = false;
      const bool is_ahead = read_ < stage_->ahead() && node_ != nullptr && !node_->autotune();
      ++read_;
      if (gate.limit() > 0 && !is_ahead) {
        place = gate.Try();
        if (!place) {
          const bool is_timed = ctx->model() != nullptr && reader_ != nullptr;
          if (is_timed) reader_->record_stop(EnvTime::NowNanos());
          place = gate.Enter(ctx->cancellation_manager());
          if (is_timed) reader_->record_start(EnvTime::NowNanos());
        }
      }
      ReaderClock& clock = ReaderClock::Mine(stage_->pool.get());
      const double began_s = Seconds(CLOCK_MONOTONIC);
      const absl::Status status = unequipped_.GetNext(input_.get(), ctx, element, end);
      const double busy_s = Seconds(CLOCK_MONOTONIC) - began_s;
      if (place) gate.Leave();
      clock.Add(stage_->pool.get(), busy_s);
      return status;
    }

   private:
    int64_t read_ = 0;  // one thread at a time reads
  };

  // What an interleave takes its inputs from.
  class Feeding : public PassThroughIterator<StageDataset> {
   public:
    using PassThroughIterator<StageDataset>::PassThroughIterator;

    absl::Status Initialize(IteratorContext* ctx) override {
      stage_ = dataset()->Find();
      IteratorContext below = OnPool(ctx, Starter::Base(ctx->thread_pool()));
      TF_RETURN_IF_ERROR(WithRunner(&below, nullptr, this, [&](IteratorContext* mine) {
        return dataset()->input()->MakeIterator(mine, this, prefix(), &input_);
      }));
      ctx->MergeCheckpoint(below.checkpoint());
      return absl::OkStatus();
    }

    absl::Status GetNextInternal(IteratorContext* ctx, std::vector<Tensor>* element, bool* end) override {
      TF_RETURN_IF_ERROR(unequipped_.GetNext(input_.get(), ctx, element, end));
      if (stage_ && *end) stage_->Ended();
      return absl::OkStatus();
    }

   protected:
    absl::Status SkipInternal(IteratorContext* ctx, int wanted, bool* end, int* skipped) override {
      return WithRunner(ctx, nullptr, this, [&](IteratorContext* mine) {
        return input_->Skip(mine, wanted, end, skipped);
      });
    }

    absl::Status RestoreInternal(IteratorContext* ctx, IteratorStateReader* reader) override {
      return WithRunner(ctx, nullptr, this, [&](IteratorContext* mine) {
        return this->RestoreInput(mine, reader, input_);
      });
    }

   private:
    std::shared_ptr<Stage> stage_;
    Unequipped unequipped_;
  };

  const std::string pipeline_, stage_;
  const int64_t role_;
};

}  // namespace intune
