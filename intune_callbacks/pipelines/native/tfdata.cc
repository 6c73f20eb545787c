// Two tf.data operations that pass elements through unchanged, and the C functions Python drives them with.
//
// IntuneStage, right downstream of a stage, hands the stage a runner of its own: a pool whose size changes live.
// IntuneSink, outermost, counts what is delivered and how long the consumer waited for it.
//
// Neither adds itself to the iterator's prefix and neither has state to save: checkpoints of a pipeline with them and
// of the same pipeline without them can be exchanged.
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "registry.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/dataset.h"
#include "tensorflow/core/framework/dataset_options.pb.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace intune {

using namespace tensorflow;        // NOLINT: the header names below are TensorFlow's own
using namespace tensorflow::data;  // NOLINT

constexpr char kPipeline[] = "pipeline", kStage[] = "stage", kRole[] = "role";

// Where an operation of a stage is: right behind it, at the end of an interleave's function, or before an interleave.
enum Role { kBehind = 0, kInside = 1, kBefore = 2 };

REGISTER_OP("IntuneStage")
    .Input("input_dataset: variant")
    .Output("handle: variant")
    .Attr("pipeline: string")
    .Attr("stage: string")
    .Attr("role: int = 0")
    .Attr("output_types: list(type) >= 1")
    .Attr("output_shapes: list(shape) >= 1")
    .SetShapeFn(shape_inference::ScalarShape);

REGISTER_OP("IntuneSink")
    .Input("input_dataset: variant")
    .Output("handle: variant")
    .Attr("pipeline: string")
    .Attr("output_types: list(type) >= 1")
    .Attr("output_shapes: list(shape) >= 1")
    .SetShapeFn(shape_inference::ScalarShape);

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

// A dataset that is its input in all but how its iterators behave.
class PassThrough : public DatasetBase {
 public:
  PassThrough(OpKernelContext* ctx, const DatasetBase* input) : DatasetBase(DatasetContext(ctx)), input_(input) {
    input_->Ref();
  }
  ~PassThrough() override { input_->Unref(); }

  const DataTypeVector& output_dtypes() const override { return input_->output_dtypes(); }
  const std::vector<PartialTensorShape>& output_shapes() const override { return input_->output_shapes(); }
  int64_t CardinalityInternal(CardinalityOptions options) const override { return input_->Cardinality(options); }
  absl::Status InputDatasets(std::vector<const DatasetBase*>* inputs) const override {
    inputs->push_back(input_);
    return absl::OkStatus();
  }
  absl::Status CheckExternalState() const override { return input_->CheckExternalState(); }
  absl::Status Get(OpKernelContext* ctx, int64_t index, std::vector<Tensor>* element) const override {
    return input_->Get(ctx, index, element);
  }
  absl::Status Get(AnyContext ctx, int64_t index, std::vector<Tensor>* element) const override {
    return input_->Get(ctx, index, element);
  }
  absl::Status RandomIndexingCompatible() const override { return input_->RandomIndexingCompatible(); }

  const DatasetBase* input() const { return input_; }

 protected:
  absl::Status Serialize(SerializationContext* ctx, DatasetGraphDefBuilder* b,
                         const std::vector<std::pair<absl::string_view, AttrValue>>& attrs,
                         ::tensorflow::Node** output) const {
    ::tensorflow::Node* input = nullptr;
    TF_RETURN_IF_ERROR(b->AddInputDataset(ctx, input_, &input));
    return b->AddDataset(this, std::vector<::tensorflow::Node*>{input}, attrs, output);
  }

  template <typename T>
  static AttrValue Attr(DatasetGraphDefBuilder* b, const T& value) {
    AttrValue attr;
    b->BuildAttrValue(value, &attr);
    return attr;
  }

 private:
  const DatasetBase* const input_;
};

template <typename D>
class PassThroughIterator : public DatasetIterator<D> {
 public:
  using DatasetIterator<D>::DatasetIterator;
  bool SymbolicCheckpointCompatible() const override { return true; }

 protected:
  std::shared_ptr<model::Node> CreateNode(IteratorContext* ctx, model::Node::Args args) const override {
    return model::MakeKnownRatioNode(std::move(args), /*ratio=*/1);
  }
  absl::Status SaveInternal(SerializationContext* ctx, IteratorStateWriter* writer) override {
    return this->SaveInput(ctx, writer, input_);
  }
  std::unique_ptr<IteratorBase> input_;
};

// The context a stage gives its input: its own runner in place of the one that came from downstream.
void Equip(IteratorContext* mine, const Stage* stage, const void* owner) {
  Runner base = PoolRunner::Base(*mine->runner());
  if (stage == nullptr) {
    *mine->runner() = std::move(base);
    return;
  }
  int intra_op = -1;
  if (mine->options() != nullptr) {
    const ThreadingOptions& threading = mine->options()->threading_options();
    using Case = ThreadingOptions::OptionalMaxIntraOpParallelismCase;
    if (threading.optional_max_intra_op_parallelism_case() == Case::kMaxIntraOpParallelism) {
      intra_op = threading.max_intra_op_parallelism();
    }
  }
  *mine->runner() = PoolRunner(stage->pool, std::move(base), owner, intra_op);
}

// Calls `use` with a copy of the context that has the stage's runner. A copy costs as much as a small function.
template <typename F>
absl::Status WithRunner(IteratorContext* ctx, const Stage* stage, const void* owner, F use) {
  IteratorContext mine(*ctx);
  Equip(&mine, stage, owner);
  TF_RETURN_IF_ERROR(use(&mine));
  ctx->MergeCheckpoint(mine.checkpoint());
  return absl::OkStatus();
}

// For datasets that are not to compute on the workers of a stage downstream: the runner below all of ours, in each
// context.
class Unequipped {
 public:
  absl::Status GetNext(IteratorBase* input, IteratorContext* ctx, std::vector<Tensor>* element, bool* end) {
    if (!PoolRunner::IsOurs(*ctx->runner())) return input->GetNext(ctx, element, end);
    if (!ctx->symbolic_checkpoint()) {
      std::call_once(once_, [this, ctx] {
        kept_ = std::make_unique<IteratorContext>(*ctx);
        Equip(kept_.get(), nullptr, this);
      });
      return input->GetNext(kept_.get(), element, end);
    }
    return WithRunner(ctx, nullptr, this, [&](IteratorContext* mine) { return input->GetNext(mine, element, end); });
  }

 private:
  std::once_flag once_;
  std::unique_ptr<IteratorContext> kept_;
};

class StageDataset : public PassThrough {
 public:
  StageDataset(OpKernelContext* ctx, const DatasetBase* input, std::string pipeline, std::string stage, int64_t role)
      : PassThrough(ctx, input), pipeline_(std::move(pipeline)), stage_(std::move(stage)), role_(role) {}
  std::string DebugString() const override { return "IntuneStage::Dataset"; }

 protected:
  std::unique_ptr<IteratorBase> MakeIteratorInternal(const std::string& prefix) const override {
    if (role_ == kBehind) return std::make_unique<Behind>(this, prefix);
    return std::make_unique<Feeding>(Feeding::Params{this, prefix});
  }
  absl::Status AsGraphDefInternal(SerializationContext* ctx, DatasetGraphDefBuilder* b,
                                  ::tensorflow::Node** output) const override {
    return Serialize(ctx, b, {{kPipeline, Attr(b, pipeline_)}, {kStage, Attr(b, stage_)}, {kRole, Attr(b, role_)}},
                     output);
  }

 private:
  std::shared_ptr<Stage> Find() const {
    return stage_.empty() ? nullptr : Registry::Get().Find(pipeline_)->Find(stage_);
  }

  // Right behind a stage, or behind another dataset that computes. Each element comes by here: what
  // `DatasetBaseIterator` does for one costs as much as a small function, so this is none of those, and has no node in
  // tf.data's model either. For the model and its tuner the pipeline is the stock one.
  class Behind : public IteratorBase {
   public:
    Behind(const StageDataset* dataset, std::string prefix) : dataset_(dataset), prefix_(std::move(prefix)) {
      dataset_->Ref();
    }

    ~Behind() override {
      if (stage_) {
        stage_->Detach(this);
        stage_->pool->Hurry(this);
      }
      input_.reset();  // waits for the closures that are still queued
      if (stage_) stage_->pool->Gone(this);
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
      TF_RETURN_IF_ERROR(WithRunner(ctx, stage_.get(), this, [&](IteratorContext* mine) {
        return dataset_->input()->MakeIterator(mine, this, prefix(), &input_);
      }));
      input_node_ = (input_.get()->*&PeekIterator::model_node)();
      if (stage_) stage_->Attach(this, input_node_);
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
      TF_RETURN_IF_ERROR(WithRunner(ctx, stage_.get(), this, [&](IteratorContext* mine) {
        return input_->Skip(mine, wanted, end, skipped);
      }));
      if (stage_) stage_->Skipped(*skipped);
      return absl::OkStatus();
    }

   protected:
    std::shared_ptr<model::Node> CreateNode(IteratorContext* ctx, model::Node::Args args) const override {
      reader_ = args.output;
      return model::MakeKnownRatioNode(std::move(args), /*ratio=*/1);
    }
    absl::Status SaveInternal(SerializationContext* ctx, IteratorStateWriter* writer) override {
      return SaveInput(ctx, writer, input_);
    }
    absl::Status RestoreInternal(IteratorContext* ctx, IteratorStateReader* reader) override {
      return WithRunner(ctx, stage_.get(), this, [&](IteratorContext* mine) {
        return RestoreInput(mine, reader, input_);
      });
    }

   private:
    struct PeekIterator : IteratorBase {
      using IteratorBase::model_node;
    };

    const StageDataset* const dataset_;
    const std::string prefix_;
    std::shared_ptr<Stage> stage_;
    std::unique_ptr<IteratorBase> input_;
    std::shared_ptr<model::Node> input_node_;
    mutable std::shared_ptr<model::Node> reader_;  // of the iterator that reads from this one
    bool is_bypassed_ = false;
    std::atomic<bool> equipped_{false};
    Unequipped unequipped_;
  };

  // What an interleave reads: its input, or the datasets its function makes.
  class Feeding : public PassThroughIterator<StageDataset> {
   public:
    using PassThroughIterator<StageDataset>::PassThroughIterator;

    absl::Status Initialize(IteratorContext* ctx) override {
      stage_ = dataset()->Find();
      return WithRunner(ctx, nullptr, this, [&](IteratorContext* mine) {
        return dataset()->input()->MakeIterator(mine, this, prefix(), &input_);
      });
    }

    absl::Status GetNextInternal(IteratorContext* ctx, std::vector<Tensor>* element, bool* end) override {
      if (stage_ && dataset()->role_ == kInside) return Read(ctx, element, end);
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
    // One element of a dataset inside an interleave, by one of its threads. Those that open files ahead are not counted
    // by the interleave's own number either: they read the first few elements, which tf.data's model leaves aside.
    absl::Status Read(IteratorContext* ctx, std::vector<Tensor>* element, bool* end) {
      Gate& gate = stage_->gate;
      bool place = false;
      const bool is_ahead = read_ < stage_->ahead() && model_node() != nullptr && !model_node()->autotune();
      ++read_;
      if (gate.limit() > 0 && !is_ahead) {
        place = gate.Try();
        if (!place) {
          RecordStop(ctx);
          place = gate.Enter(ctx->cancellation_manager());
          RecordStart(ctx);
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

    std::shared_ptr<Stage> stage_;
    int64_t read_ = 0;  // of a dataset inside an interleave, which one thread at a time reads
    Unequipped unequipped_;
  };

  const std::string pipeline_, stage_;
  const int64_t role_;
};

class SinkDataset : public PassThrough {
 public:
  SinkDataset(OpKernelContext* ctx, const DatasetBase* input, std::string pipeline)
      : PassThrough(ctx, input), pipeline_(std::move(pipeline)) {}
  std::string DebugString() const override { return "IntuneSink::Dataset"; }

 protected:
  std::unique_ptr<IteratorBase> MakeIteratorInternal(const std::string& prefix) const override {
    return std::make_unique<Iterator>(Iterator::Params{this, prefix});
  }
  absl::Status AsGraphDefInternal(SerializationContext* ctx, DatasetGraphDefBuilder* b,
                                  ::tensorflow::Node** output) const override {
    return Serialize(ctx, b, {{kPipeline, Attr(b, pipeline_)}}, output);
  }

 private:
  class Iterator : public PassThroughIterator<SinkDataset> {
   public:
    using PassThroughIterator<SinkDataset>::PassThroughIterator;

    absl::Status Initialize(IteratorContext* ctx) override {
      sink_ = Registry::Get().Find(dataset()->pipeline_)->sink;
      sink_->Opened();
      return dataset()->input()->MakeIterator(ctx, this, prefix(), &input_);
    }

    absl::Status GetNextInternal(IteratorContext* ctx, std::vector<Tensor>* element, bool* end) override {
      const double asked_s = Seconds(CLOCK_MONOTONIC);
      const double left_s = left_s_.load(std::memory_order_relaxed);
      const absl::Status status = input_->GetNext(ctx, element, end);
      const double now_s = Seconds(CLOCK_MONOTONIC);
      left_s_.store(now_s, std::memory_order_relaxed);
      sink_->Asked(now_s - asked_s, left_s > 0.0 ? std::max(0.0, asked_s - left_s) : 0.0,
                   status.ok() && !*end ? element : nullptr);
      return status;
    }

   protected:
    absl::Status RestoreInternal(IteratorContext* ctx, IteratorStateReader* reader) override {
      return this->RestoreInput(ctx, reader, input_);
    }

   private:
    std::shared_ptr<Sink> sink_;
    std::atomic<double> left_s_{0.0};
  };

  const std::string pipeline_;
};

class StageOp : public UnaryDatasetOpKernel {
 public:
  explicit StageOp(OpKernelConstruction* ctx) : UnaryDatasetOpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr(kPipeline, &pipeline_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr(kStage, &stage_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr(kRole, &role_));
  }

 protected:
  void MakeDataset(OpKernelContext* ctx, DatasetBase* input, DatasetBase** output) override {
    *output = new StageDataset(ctx, input, pipeline_, stage_, role_);
  }

 private:
  std::string pipeline_, stage_;
  int64_t role_ = kBehind;
};

class SinkOp : public UnaryDatasetOpKernel {
 public:
  explicit SinkOp(OpKernelConstruction* ctx) : UnaryDatasetOpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr(kPipeline, &pipeline_));
  }

 protected:
  void MakeDataset(OpKernelContext* ctx, DatasetBase* input, DatasetBase** output) override {
    *output = new SinkDataset(ctx, input, pipeline_);
  }

 private:
  std::string pipeline_;
};

REGISTER_KERNEL_BUILDER(Name("IntuneStage").Device(DEVICE_CPU), StageOp);
REGISTER_KERNEL_BUILDER(Name("IntuneSink").Device(DEVICE_CPU), SinkOp);

}  // namespace intune

extern "C" {

void intune_set_workers(const char* pipeline, const char* stage, int32_t workers) {
  intune::Registry::Get().Find(pipeline)->Find(stage)->pool->SetLimit(workers);
}

// The threads of an interleave that read at once, 0 for all it can have; what is in force, 0 while that is not known.
int64_t intune_set_readers(const char* pipeline, const char* stage, int64_t readers, int64_t ahead) {
  return intune::Registry::Get().Find(pipeline)->Find(stage)->SetReaders(readers, ahead);
}

void intune_follow_depth(const char* pipeline, const char* stage) {
  intune::Registry::Get().Find(pipeline)->Find(stage)->FollowDepth();
}

int64_t intune_set_window(const char* pipeline, const char* stage, int64_t window) {
  return intune::Registry::Get().Find(pipeline)->Find(stage)->SetWindow(window);
}

// Writes the names, each ended by '\n', into `names`; the size they need, the final 0 included.
int64_t intune_stages(const char* pipeline, char* names, int64_t size) {
  std::string all;
  if (const auto known = intune::Registry::Get().Known(pipeline)) {
    std::unique_lock<std::mutex> lock(known->mu);
    for (const auto& stage : known->stages) all += stage.first + "\n";
  }
  const int64_t needed = static_cast<int64_t>(all.size()) + 1;
  if (names != nullptr && size >= needed) std::memcpy(names, all.c_str(), needed);
  return needed;
}

// Fills 16 values in the order of `StageReading`; 0 if there is no such stage.
int32_t intune_read_stage(const char* pipeline, const char* stage, double* out) {
  const auto known = intune::Registry::Get().Known(pipeline);
  if (!known) return 0;
  std::shared_ptr<intune::Stage> found;
  {
    std::unique_lock<std::mutex> lock(known->mu);
    const auto at = known->stages.find(stage);
    if (at == known->stages.end()) return 0;
    found = at->second;
  }
  const auto pool = found->pool->Read();
  const auto r = found->Read();
  const double values[] = {double(r.items), pool.tally.busy_s, pool.tally.busy_s2, pool.tally.cpu_s,
                           double(pool.tally.closures), double(r.queued), double(r.window), double(pool.limit),
                           double(pool.running), r.item_bytes, double(r.node_items), r.node_busy_s,
                           double(pool.waiting + found->gate.waiting()), double(found->Readers()),
                           double(found->most()), double(found->ended())};
  std::memcpy(out, values, sizeof values);
  return 1;
}

// Fills 5 values in the order of `SinkReading`; 0 if nothing is known of the pipeline.
int32_t intune_read_sink(const char* pipeline, double* out) {
  const auto known = intune::Registry::Get().Known(pipeline);
  if (!known) return 0;
  const auto r = known->sink->Read();
  const double values[] = {double(r.delivered), r.wait_s, r.gap_s, r.batch_bytes, double(r.iterators)};
  std::memcpy(out, values, sizeof values);
  return 1;
}

void intune_release(const char* pipeline) { intune::Registry::Get().Release(pipeline); }

}  // extern "C"
