// What the datasets of both operations share: all but how their iterators behave is their input's.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "registry.h"
#include "runner.h"
#include "tensorflow/core/framework/dataset.h"
#include "tensorflow/core/framework/dataset_options.pb.h"

namespace intune {

using namespace tensorflow;        // NOLINT: the header names below are TensorFlow's own
using namespace tensorflow::data;  // NOLINT

constexpr char kPipeline[] = "pipeline", kStage[] = "stage", kRole[] = "role";

// Where an operation of a stage is: right behind it, at the end of an interleave's function, or before an interleave.
enum Role { kBehind = 0, kInside = 1, kBefore = 2 };

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
inline void Equip(IteratorContext* mine, const Stage* stage, const void* owner) {
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

// A context whose iterators start their threads on this pool.
inline IteratorContext OnPool(IteratorContext* ctx, thread::ThreadPoolInterface* pool) {
  IteratorContext::Params params(ctx);
  params.thread_pool = pool;
  return IteratorContext(std::move(params));
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

}  // namespace intune
