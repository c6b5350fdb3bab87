// torch.ops.flash_attn_cuda.{plan, fwd, bwd}: check -> allocate -> parameters -> kernels. Called by flash_attn/_ops.py,
// where the arguments' meaning is documented. LibTorch stable ABI; no Python symbols.
#include <algorithm>
#include <cstdlib>
#include <tuple>

#include "src/common/bwd_preprocess.h"
#include "src/common/plan_launch.h"
#include "src/common/shared_memory.h"
#include "tensors.h"

namespace flash_attn {
namespace {

constexpr int64_t kIntMax = INT32_MAX;
constexpr int64_t kDealtItemsPerSm = 12;  // of a persistent kernel, surplus ones too, at most, to be dealt out

Kernels const& kernels_for(Device const& device, int64_t head_dim, DType dtype, bool extras) {
    Kernels const* kernels = find_kernels(device, head_dim, dtype, extras);
    if (!kernels) throw std::runtime_error(why_not(device, head_dim, dtype, extras));
    return *kernels;
}

template <typename Function, typename Params>
void launch(Function function, Params const& params, Kernels const& kernels, char const* pass, cudaStream_t stream) {
    if (!function) throw std::runtime_error(text("flash_attn: ", name_of(kernels, pass), " is not built in this library"));
    cudaError_t const status = function(params, stream);
    if (status == cudaErrorInvalidValue && kernels.arch == 80)  // from the request for shared memory
        throw std::runtime_error(text("flash_attn: ", name_of(kernels, pass), " needs more than the ", shared_memory_limit() / 1024,
                                      " KB of shared memory that a block may use on this GPU"));
    check_cuda(status, [&] { return name_of(kernels, pass); });
}

// Context items are the longest, and a launch is as long as the SM with most to do. Few of them (short prompts) have their rows
// cut in up to kMaxSplits parts, for two an SM; few and long ones are cut further. Where few items are taken longest first over all
// heads (`sorted`: the sm_90a path), short ones fill up the end, and more than two parts serve for one an SM only. From shapes only.
int choose_splits(int64_t context_rows, int64_t total_q, int64_t num_heads_k, int num_sms, int block, bool sorted) {
    int64_t const items = (context_rows + block - 1) / block * num_heads_k;
    if (items == 0) return 1;
    int64_t const enough = sorted ? std::max<int64_t>(2, (num_sms + items / 2) / items) : kMaxSplits;
    int64_t const to_fill = std::min((2 * num_sms + items / 2) / items, enough);
    int64_t const to_shorten = std::min(4 * num_sms / items, total_q / kSplitRows);
    return int(std::clamp<int64_t>(std::max(to_fill, to_shorten), 1, kMaxSplits));
}

// Splits are not an argument of bwd: the length of the list says how many the plan was built with.
int splits_of(int64_t num_key_items, FwdParams const& p, bool context_in_k, int64_t num_segments, int block) {
    for (int splits = 1; splits <= kMaxSplits; ++splits)
        if (key_capacity(p.total_k, p.total_context, context_in_k, num_segments, block, splits) == num_key_items) return splits;
    FLASH_ATTN_CHECK(false, "plan[3]", "be built for these tensors", num_key_items);
    return 1;
}

std::vector<Tensor> plan(Tensor segments, int64_t total_q, int64_t total_k, std::optional<int64_t> total_context,
                         int64_t context_rows, int64_t num_heads_k, int64_t head_dim, ScalarType dtype, bool causal,
                         int64_t window_left, int64_t window_right, bool forward_only, bool separate) {
    check_table(segments, "segments", 6, segments);
    for (int64_t rows : {total_q, total_k, total_context.value_or(0)}) FLASH_ATTN_CHECK(rows >= 0 && rows <= kIntMax, "rows", "be below 2**31", rows);
    Device const& device = device_of(segments.get_device_index());
    Kernels const& kernels = kernels_for(device, head_dim, dtype_of(dtype), separate);
    DeviceScope const scope(device.index);
    TileSizes const tile = kernels.tile(shared_memory_limit());
    auto const window = [](int64_t w) { return int(w < 0 ? -1 : std::min<int64_t>(w, kIntMax)); };

    PlanParams p{};
    p.segments = static_cast<int const*>(segments.data_ptr());
    p.num_segments = int(segments.size(0));
    p.total_q = int(total_q), p.total_k = int(total_k), p.total_context = int(total_context.value_or(total_k));
    p.context_in_k = !total_context.has_value();
    p.separate = separate;
    p.window_left = window(window_left);
    p.window_right = causal ? 0 : window(window_right);
    p.fwd_block_m = tile.fwd_block_m, p.bwd_block_n = tile.bwd_block_n;
    p.num_splits = kernels.pass_wise ? 1 : choose_splits(context_rows, total_q, num_heads_k, device.num_sms, tile.bwd_block_n, kernels.arch == 90);
    int64_t const queries = query_capacity(total_q, p.num_segments, tile.fwd_block_m);
    int64_t const keys = forward_only ? 0 : key_capacity(total_k, p.total_context, p.context_in_k, p.num_segments, tile.bwd_block_n, p.num_splits);
    FLASH_ATTN_CHECK(queries + keys <= kIntMax, "segments", "have fewer rows", shape_of(segments));
    p.query_capacity = int(queries), p.key_capacity = int(keys);
    p.few_items = kernels.arch == 90 && few_key_items(keys, num_heads_k, device.num_sms);

    std::vector<Tensor> tables{new_empty(segments, {total_q, 4}, ScalarType::Int),
                               new_empty(segments, {(total_q + kBlockRows - 1) / kBlockRows, 8}, ScalarType::Int),
                               new_empty(segments, {queries, 12}, ScalarType::Int),
                               new_empty(segments, {keys, 8}, ScalarType::Int)};
    Tensor const scratch = new_bytes(segments, plan_scratch_bytes(p));
    p.row_span = static_cast<RowSpan*>(tables[0].data_ptr());
    p.block_span = static_cast<BlockSpan*>(tables[1].data_ptr());
    p.query_items = static_cast<QueryItem*>(tables[2].data_ptr());
    p.key_items = static_cast<KeyItem*>(tables[3].data_ptr());
    set_plan_scratch(p, scratch.data_ptr());
    check_cuda(run_plan(p, current_stream(device.index)), "plan");
    return tables;
}

// What forward and backward share: checked operands on the current device, and the parameters they fill. Tensors are kept alive here.
struct Call {
    Device const& device;
    DeviceScope const scope;
    Kernels const& kernels;
    TileSizes const tile;
    bool const context_in_k;
    Operand const q, k, v, k_context, v_context;
    std::optional<Tensor> tile_counter;
    Extras extras{};  // where params.extras points to it
    FwdParams params{};

    Call(Tensor const& q_, Tensor const& k_, Tensor const& v_, OptionalTensor const& k_context_, OptionalTensor const& v_context_,
         Tensor const& segments, std::vector<Tensor> const& plan, double softmax_scale, double softcap, bool with_extras = false)
        : device(checked_device(q_, k_, v_, k_context_, v_context_)), scope(device.index),
          kernels(kernels_for(device, q_.size(q_.dim() - 1), dtype_of(q_.scalar_type()), with_extras)), tile(kernels.tile(shared_memory_limit())),
          context_in_k(!k_context_.has_value()), q(as_operand(q_)), k(as_operand(k_)), v(as_operand(v_)),
          k_context(context_in_k ? k : as_operand(*k_context_)), v_context(context_in_k ? v : as_operand(*v_context_)) {
        FLASH_ATTN_CHECK(q.head_dim % 8 == 0, "head_dim", "be a multiple of 8", q.head_dim);
        FLASH_ATTN_CHECK(k.heads > 0 && q.heads % k.heads == 0, "num_heads", text("be a multiple of num_heads_k, ", k.heads), q.heads);
        FLASH_ATTN_CHECK(k_context.heads == k.heads, "k_context", text("have ", k.heads, " heads"), k_context.heads);
        FLASH_ATTN_CHECK(q.rows <= kIntMax && k.rows <= kIntMax, "q and k", "have fewer than 2**31 rows", q.rows);
        FLASH_ATTN_CHECK(plan.size() == 4, "plan", "have four tables", plan.size());
        check_table(segments, "segments", 6, q_);
        check_table(plan[0], "plan[0]", 4, q_);
        check_table(plan[1], "plan[1]", 8, q_);
        check_table(plan[2], "plan[2]", 12, q_);
        check_table(plan[3], "plan[3]", 8, q_);
        FLASH_ATTN_CHECK(plan[0].size(0) == q.rows, "plan", text("be built for ", q.rows, " rows of q"), plan[0].size(0));
        FLASH_ATTN_CHECK(plan[2].size(0) == query_capacity(q.rows, segments.size(0), tile.fwd_block_m), "plan[2]", "be built for these tensors",
              plan[2].size(0));

        params.q = q.data, params.q_row_stride = q.row_stride, params.q_head_stride = q.head_stride;
        params.k = k.data, params.k_row_stride = k.row_stride, params.k_head_stride = k.head_stride;
        params.v = v.data, params.v_row_stride = v.row_stride, params.v_head_stride = v.head_stride;
        params.k_context = k_context.data, params.k_context_row_stride = k_context.row_stride, params.k_context_head_stride = k_context.head_stride;
        params.v_context = v_context.data, params.v_context_row_stride = v_context.row_stride, params.v_context_head_stride = v_context.head_stride;
        params.total_q = int(q.rows), params.total_k = int(k.rows), params.total_context = int(k_context.rows);
        params.num_heads = int(q.heads), params.num_heads_k = int(k.heads), params.head_dim = int(q.head_dim);
        params.softmax_scale = float(softmax_scale), params.softcap = float(softcap);
        params.plan = {static_cast<RowSpan const*>(plan[0].data_ptr()), static_cast<BlockSpan const*>(plan[1].data_ptr()),
                       static_cast<QueryItem const*>(plan[2].data_ptr()), static_cast<KeyItem const*>(plan[3].data_ptr()),
                       int(plan[2].size(0)), int(plan[3].size(0))};
    }

    static Device const& checked_device(Tensor const& q, Tensor const& k, Tensor const& v, OptionalTensor const& k_context,
                                        OptionalTensor const& v_context) {
        FLASH_ATTN_CHECK((q.dim() == 3 || q.dim() == 4) && q.is_cuda(), "q",
                         "be (total_q, num_heads, head_dim) or (batch, seqlen, num_heads, head_dim) on a GPU", shape_of(q));
        check_operand(k, "k", "(total_k, num_heads_k, head_dim)", q);
        check_operand(v, "v", "(total_k, num_heads_k, head_dim)", q);
        FLASH_ATTN_CHECK(same_shape(v, k), "v", text("have the shape of k, ", shape_of(k)), shape_of(v));
        if (k_context) {
            FLASH_ATTN_CHECK(v_context.has_value(), "v_context", "be given with k_context", "None");
            check_operand(*k_context, "k_context", "(total_context, num_heads_k, head_dim)", q);
            check_operand(*v_context, "v_context", "(total_context, num_heads_k, head_dim)", q);
            FLASH_ATTN_CHECK(same_shape(*v_context, *k_context), "v_context", "have the shape of k_context", shape_of(*v_context));
        }
        return device_of(q.get_device_index());
    }

    void set_out(Operand const& out, Tensor const& lse) {
        params.out = out.data, params.out_row_stride = out.row_stride, params.out_head_stride = out.head_stride;
        params.lse = static_cast<float*>(lse.data_ptr()), params.lse_head_stride = lse.stride(0);
    }

    // After the constructor, with `with_extras`: no dropout without `rng_state`.
    void set_extras(Tensor const& segments, OptionalTensor const& alibi_slopes, double dropout_p, OptionalTensor const& rng_state) {
        extras.segments = static_cast<int const*>(segments.data_ptr());
        extras.keep_below = 256, extras.keep_scale = 1.f;
        if (alibi_slopes) {
            bool const rows = alibi_slopes->dim() == 2;
            FLASH_ATTN_CHECK(alibi_slopes->is_cuda() && alibi_slopes->scalar_type() == ScalarType::Float && alibi_slopes->is_contiguous() &&
                                 (rows ? has_shape(*alibi_slopes, {segments.size(0), q.heads}) : has_shape(*alibi_slopes, {q.heads})),
                             "alibi_slopes", "be contiguous float32 (num_heads,) or (num_segments, num_heads) on the device of q", shape_of(*alibi_slopes));
            extras.alibi_slopes = static_cast<float const*>(alibi_slopes->data_ptr());
            extras.alibi_segment_stride = rows ? q.heads : 0;
        }
        if (rng_state) {
            FLASH_ATTN_CHECK(rng_state->is_cuda() && rng_state->scalar_type() == ScalarType::Long && has_shape(*rng_state, {2}) && rng_state->is_contiguous(),
                             "rng_state", "be int64 (2,) on the device of q", shape_of(*rng_state));
            FLASH_ATTN_CHECK(dropout_p > 0. && dropout_p < 1., "dropout_p", "be in (0, 1)", dropout_p);
            extras.rng_state = static_cast<int64_t const*>(rng_state->data_ptr());
            extras.keep_below = int(std::clamp<int64_t>(int64_t(256. * (1. - dropout_p) + 0.5), 1, 255));
            extras.keep_scale = float(1. / (1. - dropout_p));
        }
        params.extras = &extras;
    }

    // A zero for the persistent schedulers of the sm_90a path. Few items are dealt out in turn instead, without a counter.
    void reset_counter(cudaStream_t stream) {
        int64_t const items = int64_t(params.plan.num_query_items) * params.num_heads;
        if (kernels.arch != 90 || items <= kDealtItemsPerSm * device.num_sms) return;
        if (!params.tile_counter) {
            tile_counter = new_bytes(q.tensor, 16);
            params.tile_counter = static_cast<int*>(tile_counter->data_ptr());
        }
        check_cuda(cudaMemsetAsync(params.tile_counter, 0, sizeof(int), stream), "cudaMemsetAsync");
    }

    bool no_keys() const { return params.total_k == 0 && params.total_context == 0; }
};

// out has the shape of q.
std::tuple<Tensor, Tensor> run_forward(Call& call, Tensor const& q) {
    Tensor out = new_like(q), lse = new_empty(q, {call.q.heads, call.q.rows}, ScalarType::Float);
    if (call.no_keys()) {
        torch::stable::zero_(out);
        torch::stable::fill_(lse, -INFINITY);
    } else if (call.q.rows > 0) {
        cudaStream_t const stream = current_stream(call.device.index);
        call.set_out(Operand(out), lse);
        call.reset_counter(stream);
        launch(call.params.extras ? call.kernels.fwd_extras : call.kernels.fwd, call.params, call.kernels, "fwd", stream);
    }
    return {out, lse};
}

std::tuple<Tensor, Tensor> fwd(Tensor q, Tensor k, Tensor v, OptionalTensor k_context, OptionalTensor v_context, Tensor segments,
                               std::vector<Tensor> plan, double softmax_scale, double softcap) {
    Call call(q, k, v, k_context, v_context, segments, plan, softmax_scale, softcap);
    return run_forward(call, q);
}

std::tuple<Tensor, Tensor> fwd_extras(Tensor q, Tensor k, Tensor v, Tensor segments, std::vector<Tensor> plan, double softmax_scale, double softcap,
                                      OptionalTensor alibi_slopes, double dropout_p, OptionalTensor rng_state) {
    Call call(q, k, v, {}, {}, segments, plan, softmax_scale, softcap, true);
    call.set_extras(segments, alibi_slopes, dropout_p, rng_state);
    return run_forward(call, q);
}

// Bytes that the fp32 accumulator of dq may take; kv heads are processed in chunks that keep within it. Each chunk is a launch, at whose
// end part of the GPU has no work: up to head dim 128 in the Hopper kernels more room pays (32 responses of 2,048 on 12,288: 81 -> 64 ms).
int64_t dq_accum_limit(Kernels const& kernels) {
    char const* value = std::getenv("FLASH_ATTN_DQ_ACCUM_MB");
    int64_t const megabytes = value ? std::atoll(value) : kernels.arch == 90 && kernels.head_dim <= 128 ? 1024 : 512;
    FLASH_ATTN_CHECK(megabytes > 0, "FLASH_ATTN_DQ_ACCUM_MB", "be a positive number", value ? value : "");
    return megabytes << 20;
}

struct Gradients {
    Tensor dq, dk, dv, dk_context, dv_context;
};

void set_gradients(BwdParams& p, Gradients const& g, bool context_in_k) {
    Operand const dq(g.dq), dk(g.dk), dv(g.dv), dkc(context_in_k ? g.dk : g.dk_context), dvc(context_in_k ? g.dv : g.dv_context);
    p.dq = dq.data, p.dq_row_stride = dq.row_stride, p.dq_head_stride = dq.head_stride;
    p.dk = dk.data, p.dk_row_stride = dk.row_stride, p.dk_head_stride = dk.head_stride;
    p.dv = dv.data, p.dv_row_stride = dv.row_stride, p.dv_head_stride = dv.head_stride;
    p.dk_context = dkc.data, p.dk_context_row_stride = dkc.row_stride, p.dk_context_head_stride = dkc.head_stride;
    p.dv_context = dvc.data, p.dv_context_row_stride = dvc.row_stride, p.dv_context_head_stride = dvc.head_stride;
}

// The launches: per chunk of kv heads preprocess -> main kernel -> postprocess; then the separate dq pass, if any.
// Gradients are allocated while the first kernel runs, which does not need them.
template <typename Allocate>
Gradients run_backward(Call& call, BwdParams& p, Tensor const& q, bool separate_dq, cudaStream_t stream, Allocate allocate) {
    std::optional<Gradients> gradients;
    Kernels const& kernels = call.kernels;
    int const heads_k = p.fwd.num_heads_k, heads_per_kv = p.fwd.num_heads / heads_k;
    int64_t const head_bytes = heads_per_kv * p.rows_padded * kernels.head_dim * 4, limit = dq_accum_limit(kernels);
    auto const bwd = p.fwd.extras ? kernels.bwd_extras : kernels.bwd, bwd_dq = p.fwd.extras ? kernels.bwd_dq_extras : kernels.bwd_dq;
    separate_dq = separate_dq || kernels.pass_wise || (head_bytes > limit && bwd_dq);
    int64_t const chunk_limit = separate_dq ? heads_k : std::clamp<int64_t>(limit / head_bytes, 1, heads_k);
    int const num_chunks = int((heads_k + chunk_limit - 1) / chunk_limit), chunk = (heads_k + num_chunks - 1) / num_chunks;
    std::optional<Tensor> dq_accum;
    if (!separate_dq) {
        dq_accum = new_bytes(q, chunk * head_bytes);
        p.dq_accum = static_cast<float*>(dq_accum->data_ptr());
    }
    for (p.head_k_begin = 0; p.head_k_begin < heads_k; p.head_k_begin = p.head_k_end) {
        p.head_k_end = std::min(p.head_k_begin + chunk, heads_k);
        check_cuda(run_bwd_preprocess(p, kernels.dtype == DType::kBFloat16, kernels.head_dim, stream), "bwd preprocess");
        if (!gradients) set_gradients(p, gradients.emplace(allocate()), call.context_in_k);
        launch(bwd, p, kernels, "bwd", stream);
        if (p.dq_accum || p.dk_partial) launch(kernels.bwd_post, p, kernels, "bwd_post", stream);
    }
    if (!separate_dq) return *gradients;
    p.head_k_begin = 0, p.head_k_end = heads_k;
    call.reset_counter(stream);
    p.fwd.tile_counter = call.params.tile_counter;
    launch(bwd_dq, p, kernels, "bwd_dq", stream);
    return *gradients;
}

using AllGradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

AllGradients run_backward_of(Call& call, Tensor const& dout, OptionalTensor const& dlse, Tensor const& q, Tensor const& k, Tensor const& v,
                             OptionalTensor const& k_context, OptionalTensor const& v_context, Tensor const& out, Tensor const& lse,
                             Tensor const& segments, bool deterministic) {
    for (auto const& [x, name] : {std::pair{&dout, "dout"}, std::pair{&out, "out"}}) {
        check_operand(*x, name, "(total_q, num_heads, head_dim)", q);
        FLASH_ATTN_CHECK(same_shape(*x, q), name, text("have the shape of q, ", shape_of(q)), shape_of(*x));
    }
    for (auto const& [x, name] : {std::pair<Tensor const*, char const*>{&lse, "lse"}, {dlse ? &*dlse : &lse, "dlse"}})
        FLASH_ATTN_CHECK(has_shape(*x, {call.q.heads, call.q.rows}) && x->scalar_type() == ScalarType::Float, name,
                         "be float32 (num_heads, total_q)", shape_of(*x));

    auto const none = [&] { return new_empty(q, {0, call.k.heads, call.k.head_dim}, q.scalar_type()); };
    auto const allocate = [&] {
        return Gradients{new_like(q), new_like(k), new_like(v), k_context ? new_like(*k_context) : none(), v_context ? new_like(*v_context) : none()};
    };
    if (call.no_keys() || call.q.rows == 0) {
        Gradients g = allocate();
        for (Tensor* x : {&g.dq, &g.dk, &g.dv, &g.dk_context, &g.dv_context}) torch::stable::zero_(*x);
        return {g.dq, g.dk, g.dv, g.dk_context, g.dv_context};
    }
    Operand const dout_operand = as_operand(dout), out_operand = as_operand(out);
    Tensor const lse_rows = as_row_values(lse);
    Tensor const dlse_rows = dlse ? as_row_values(*dlse) : lse_rows;
    call.set_out(out_operand, lse_rows);

    BwdParams p{};
    p.fwd = call.params;
    p.dout = dout_operand.data, p.dout_row_stride = dout_operand.row_stride, p.dout_head_stride = dout_operand.head_stride;
    if (dlse) p.dlse = static_cast<float const*>(dlse_rows.data_ptr()), p.dlse_head_stride = dlse_rows.stride(0);
    p.rows_padded = (call.q.rows + 127) / 128 * 128;
    p.num_splits = splits_of(p.fwd.plan.num_key_items, p.fwd, call.context_in_k, segments.size(0),
                             call.tile.bwd_block_n);
    int64_t const rows = call.q.heads * p.rows_padded, context_rows = call.k_context.rows * call.k.heads;
    int64_t const partial = p.num_splits > 1 ? p.num_splits * context_rows * call.kernels.head_dim : 0;
    int64_t const counts = partial > 0 && call.kernels.arch == 90 ? 2 * context_rows : 0;
    Tensor const scratch = new_empty(q, {2 * (rows + partial) + counts}, ScalarType::Float);
    p.lse_log2 = static_cast<float*>(scratch.data_ptr());
    p.dout_dot_out = p.lse_log2 + rows;
    if (partial > 0) {
        p.dk_partial = p.dout_dot_out + rows;
        p.dv_partial = p.dk_partial + partial;
        if (counts > 0) p.split_counts = reinterpret_cast<int*>(p.dv_partial + partial);
    }
    Gradients const g = run_backward(call, p, q, deterministic, current_stream(call.device.index), allocate);
    return {g.dq, g.dk, g.dv, g.dk_context, g.dv_context};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> bwd(Tensor dout, OptionalTensor dlse, Tensor q, Tensor k, Tensor v,
                                                       OptionalTensor k_context, OptionalTensor v_context, Tensor out, Tensor lse,
                                                       Tensor segments, std::vector<Tensor> plan, double softmax_scale, double softcap,
                                                       bool deterministic) {
    Call call(q, k, v, k_context, v_context, segments, plan, softmax_scale, softcap);
    return run_backward_of(call, dout, dlse, q, k, v, k_context, v_context, out, lse, segments, deterministic);
}

std::tuple<Tensor, Tensor, Tensor> bwd_extras(Tensor dout, OptionalTensor dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor segments,
                                              std::vector<Tensor> plan, double softmax_scale, double softcap, bool deterministic,
                                              OptionalTensor alibi_slopes, double dropout_p, OptionalTensor rng_state) {
    Call call(q, k, v, {}, {}, segments, plan, softmax_scale, softcap, true);
    call.set_extras(segments, alibi_slopes, dropout_p, rng_state);
    auto const [dq, dk, dv, dk_context, dv_context] = run_backward_of(call, dout, dlse, q, k, v, {}, {}, out, lse, segments, deterministic);
    return {dq, dk, dv};
}

std::string built() { return built_kernels(); }

std::string build_id() { return kBuildId; }

// "" where the kernels (`extras`: those with ALiBi and dropout) run for this head dim and dtype on this device.
std::string unsupported(int64_t device, int64_t head_dim, ScalarType dtype, bool extras) {
    return why_not(device_of(int(device)), head_dim, dtype_of(dtype), extras);
}

}  // namespace
}  // namespace flash_attn

#define FLASH_ATTN_EXTRAS "Tensor? alibi_slopes, float dropout_p, Tensor? rng_state)"

STABLE_TORCH_LIBRARY(flash_attn_cuda, m) {
    m.def("plan(Tensor segments, int total_q, int total_k, int? total_context, int context_rows, int num_heads_k, int head_dim, "
          "ScalarType dtype, bool causal, int window_size_left, int window_size_right, bool forward_only, bool separate=False) -> Tensor[]");
    m.def("fwd(Tensor q, Tensor k, Tensor v, Tensor? k_context, Tensor? v_context, Tensor segments, Tensor[] plan, float softmax_scale, "
          "float softcap) -> (Tensor out, Tensor lse)");
    m.def("bwd(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor? k_context, Tensor? v_context, Tensor out, Tensor lse, "
          "Tensor segments, Tensor[] plan, float softmax_scale, float softcap, bool deterministic) "
          "-> (Tensor dq, Tensor dk, Tensor dv, Tensor dk_context, Tensor dv_context)");
    m.def("fwd_extras(Tensor q, Tensor k, Tensor v, Tensor segments, Tensor[] plan, float softmax_scale, float softcap, "
          FLASH_ATTN_EXTRAS " -> (Tensor out, Tensor lse)");
    m.def("bwd_extras(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor segments, Tensor[] plan, "
          "float softmax_scale, float softcap, bool deterministic, " FLASH_ATTN_EXTRAS " -> (Tensor dq, Tensor dk, Tensor dv)");
    m.def("built() -> str");
    m.def("build_id() -> str");
    m.def("unsupported(int device, int head_dim, ScalarType dtype, bool extras=False) -> str");
}

STABLE_TORCH_LIBRARY_IMPL(flash_attn_cuda, CUDA, m) {
    m.impl("plan", TORCH_BOX(flash_attn::plan));
    m.impl("fwd", TORCH_BOX(flash_attn::fwd));
    m.impl("bwd", TORCH_BOX(flash_attn::bwd));
    m.impl("fwd_extras", TORCH_BOX(flash_attn::fwd_extras));
    m.impl("bwd_extras", TORCH_BOX(flash_attn::bwd_extras));
}

STABLE_TORCH_LIBRARY_IMPL(flash_attn_cuda, CompositeExplicitAutograd, m) {
    m.impl("built", TORCH_BOX(flash_attn::built));
    m.impl("build_id", TORCH_BOX(flash_attn::build_id));
    m.impl("unsupported", TORCH_BOX(flash_attn::unsupported));
}
