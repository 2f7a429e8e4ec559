// A device for tests, as PyTorch's PrivateUse1 backend. Its memory is the host's, at addresses that only its own kernels
// can translate: whatever else reads or writes there is ended by the processor, as is a read of a GPU's memory.
//
// A kernel is the CPU's, on tensors that alias the device's: the same sizes, strides and offset in the same memory.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <cstring>
#include <mutex>
#include <unordered_map>
#include <unordered_set>

namespace {

const c10::Device DEVICE(c10::DeviceType::PrivateUse1, 0);
// No process has memory at addresses with this bit: it is beyond what processors translate for users.
constexpr uintptr_t ON_DEVICE = uintptr_t(1) << 52;
// New memory: NaN as a floating-point number, and -1 as an integer, so that nobody takes it for something.
constexpr int UNWRITTEN = 0xff;

void* translated(void* pointer) {
  return pointer ? reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(pointer) ^ ON_DEVICE) : nullptr;
}

// What a GPU's driver would have to wait for, or to copy between device and host: names of operators, in their order.
class Events {
 public:
  void add(const std::string& name) {
    std::lock_guard<std::mutex> lock(mutex_);
    names_.push_back(name);
  }
  std::vector<std::string> take() {
    std::lock_guard<std::mutex> lock(mutex_);
    return std::exchange(names_, {});
  }

 private:
  std::mutex mutex_;
  std::vector<std::string> names_;
} events;

template <class Owner>
c10::DataPtr translated(void* pointer, Owner owner, c10::Device device) {
  auto* kept = new Owner(std::move(owner));
  return {translated(pointer), kept, [](void* owner) { delete static_cast<Owner*>(owner); }, device};
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    auto memory = c10::GetCPUAllocator()->allocate(bytes);
    auto* pointer = memory.get();
    if (bytes) std::memset(pointer, UNWRITTEN, bytes);
    return translated(pointer, std::move(memory), DEVICE);
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(translated(to), translated(const_cast<void*>(from)), bytes);
  }
} allocator;
REGISTER_ALLOCATOR(c10::DeviceType::PrivateUse1, &allocator)

// Storages and tensors of one call on both sides: what aliases on one side aliases on the other.
class Aliases {
 public:
  at::Tensor on_host(const at::Tensor& tensor) { return alias(tensor, on_host(tensor.storage()), c10::DispatchKey::CPU); }

  at::Tensor on_device(const at::Tensor& tensor) {
    auto& known = devices_[tensor.storage().unsafeGetStorageImpl()];
    if (!known) known = counterpart(tensor.storage(), DEVICE, &allocator);
    return alias(tensor, known, c10::DispatchKey::PrivateUse1);
  }

  c10::Storage on_host(const c10::Storage& storage) {
    auto& known = hosts_[storage.unsafeGetStorageImpl()];
    if (!known) {
      known = counterpart(storage, c10::kCPU, c10::GetCPUAllocator());
      devices_[known.unsafeGetStorageImpl()] = storage;
    }
    return known;
  }

  // A kernel may have given the tensor that it writes another size, and more memory.
  void resize(const at::Tensor& tensor, const at::Tensor& host) {
    auto from = host.storage(), to = tensor.storage();
    if (translated(from.mutable_data()) != to.mutable_data() || from.nbytes() != to.nbytes()) {
      to.unsafeGetStorageImpl()->set_data_ptr_noswap(translated(from.mutable_data(), from, DEVICE));
      to.set_nbytes(from.nbytes());
    }
    auto* impl = tensor.unsafeGetTensorImpl();
    if (host.sizes() != tensor.sizes() || host.strides() != tensor.strides())
      impl->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
  }

 private:
  static c10::Storage counterpart(const c10::Storage& storage, c10::Device device, c10::Allocator* by) {
    auto memory = translated(const_cast<c10::Storage&>(storage).mutable_data(), storage, device);
    return {c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(memory), by, /*resizable=*/true};
  }

  static at::Tensor alias(const at::Tensor& tensor, c10::Storage storage, c10::DispatchKey key) {
    auto result = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), tensor.dtype());
    result.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
    result._set_conj(tensor.is_conj());
    result._set_neg(tensor.is_neg());
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) result.unsafeGetTensorImpl()->set_wrapped_number(true);
    return result;
  }

  std::unordered_map<c10::StorageImpl*, c10::Storage> hosts_, devices_;
};

// The device's random numbers are not the CPU's for the same seed.
struct DeviceGenerator final : c10::GeneratorImpl {
  explicit DeviceGenerator(uint64_t seed)
      : c10::GeneratorImpl(DEVICE, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)), host(at::detail::createCPUGenerator()) {
    set_current_seed(seed);
  }
  void set_current_seed(uint64_t seed) override { host.set_current_seed((seed_ = seed) ^ 0x5eed); }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "this device's generators have no offset"); }
  uint64_t get_offset() const override { return 0; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override { return host.seed(); }
  void set_state(const c10::TensorImpl& state) override { host.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return host.unsafeGetGeneratorImpl()->get_state(); }
  DeviceGenerator* clone_impl() const override {
    auto* copy = new DeviceGenerator(seed_);
    copy->set_state(*get_state());
    return copy;
  }

  at::Generator host;

 private:
  uint64_t seed_ = 0;
};

const at::Generator& default_generator() {
  static const auto generator = at::make_generator<DeviceGenerator>(0);
  return generator;
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::Device getDeviceFromPtr(void*) const override { return DEVICE; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return default_generator(); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::make_generator<DeviceGenerator>(0); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto memory = allocator.allocate(bytes);
    allocator.copy_data(memory.get(), storage.data(), std::min(bytes, storage.nbytes()));
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(memory));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};

struct Guard final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::PrivateUse1> {
  c10::Device exchangeDevice(c10::Device) const override { return DEVICE; }
  c10::Device getDevice() const override { return DEVICE; }
  c10::Stream getStream(c10::Device) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, DEVICE); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, DEVICE); }
  void synchronizeDevice(const c10::DeviceIndex) const override { events.add("synchronize"); }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// A GPU's kernels take a number of the host's as an argument where they compute element by element.
bool takes_numbers_of_host(const c10::OperatorHandle& op) {
  static const std::unordered_set<std::string> more = {
      "aten::fill_", "aten::masked_fill_", "aten::index_put_", "aten::_index_put_impl_", "aten::where",
      "aten::floor_divide"};
  return op.hasTag(at::Tag::pointwise) || more.count(op.schema().name());
}

class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack* stack) : op_(op), stack_(stack) {}

  void run() {
    const auto& arguments = op_.schema().arguments();
    const auto first = stack_->size() - arguments.size();
    if (op_.hasTag(at::Tag::data_dependent_output) || op_.hasTag(at::Tag::dynamic_output_shape))
      events.add(op_.schema().name());
    for (size_t i = 0; i < arguments.size(); ++i) {
      auto& value = (*stack_)[first + i];
      value = on_host(value, *arguments[i].type());
    }
    {
      at::AutoDispatchBelowADInplaceOrView below;
      op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack_);
    }
    for (auto& [host, tensor] : given_) aliases_.resize(tensor, at::Tensor(host));
    for (auto& value : torch::jit::last(*stack_, op_.schema().returns().size())) const_cast<c10::IValue&>(value) = on_device(value);
  }

 private:
  at::Tensor on_host(const at::Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    if (tensor.device() != DEVICE) {
      TORCH_CHECK(tensor.dim() == 0 && takes_numbers_of_host(op_), op_.schema().name(),
                  ": Expected all tensors to be on the same device, but found ", tensor.device(), " beside ", DEVICE);
      return tensor;
    }
    auto host = aliases_.on_host(tensor);
    given_.emplace_back(host.getIntrusivePtr(), tensor);
    return host;
  }

  // Indices of the host are copied to a GPU.
  at::Tensor index_on_host(const at::Tensor& tensor) {
    if (!tensor.defined() || tensor.device() == DEVICE) return on_host(tensor);
    events.add("copy from host to device");
    return tensor;
  }

  at::Tensor on_device(const at::Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    for (auto& [host, given] : given_)
      if (host.get() == tensor.unsafeGetTensorImpl()) return given;
    return aliases_.on_device(tensor);
  }

  c10::IValue on_host(const c10::IValue& value, const c10::Type& type) {
    if (value.isTensor()) return on_host(value.toTensor());
    if (value.isStorage()) return aliases_.on_host(value.toStorage());
    if (value.isDevice()) return c10::Device(c10::kCPU);
    if (value.isGenerator() || (value.isNone() && type.str() == "Generator?")) {
      const auto& generator = value.isNone() ? default_generator() : value.toGenerator();
      return generator.get<DeviceGenerator>()->host;
    }
    if (value.isTensorList()) {
      auto tensors = value.toTensorVector();
      for (auto& tensor : tensors) tensor = on_host(tensor);
      return tensors;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> tensors;
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList())
        tensors.push_back(tensor ? std::optional(index_on_host(*tensor)) : tensor);
      return tensors;
    }
    return value;
  }

  c10::IValue on_device(const c10::IValue& value) {
    if (value.isTensor()) return on_device(value.toTensor());
    if (!value.isTensorList()) return value;
    auto tensors = value.toTensorVector();
    for (auto& tensor : tensors) tensor = on_device(tensor);
    return tensors;
  }

  const c10::OperatorHandle& op_;
  torch::jit::Stack* stack_;
  Aliases aliases_;
  std::vector<std::pair<c10::intrusive_ptr<c10::TensorImpl>, at::Tensor>> given_;
};

void run_on_aliases(const c10::OperatorHandle& op, torch::jit::Stack* stack) { Call(op, stack).run(); }

at::Tensor host_alias(const at::Tensor& tensor) { return Aliases().on_host(tensor); }

at::Tensor& copy(at::Tensor& to, const at::Tensor& from, bool) {
  if (from.device() != to.device()) events.add(from.is_cpu() ? "copy from host to device" : "copy from device to host");
  at::AutoDispatchBelowADInplaceOrView below;
  auto target = to.is_cpu() ? to : host_alias(to);
  target.copy_(from.is_cpu() ? from : host_alias(from));
  return to;
}

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_aliases>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("copy_", copy);
  // Of the first two PyTorch would ask other operators, which a CPU does not have; the CPU's kernel of the third resizes
  // the result that PyTorch would give it.
  for (const char* name : {"convolution", "convolution_backward", "mse_loss"})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_on_aliases>());
}

TORCH_LIBRARY(acc, library) {
  library.def("take_events() -> str[]", [] { return events.take(); });
  library.def("note(str event) -> ()", [](std::string event) { events.add(event); });
  library.def("manual_seed(int seed) -> ()", [](int64_t seed) { default_generator().get<DeviceGenerator>()->set_current_seed(seed); });
  library.def("get_rng_state() -> Tensor", [] { return at::Tensor(default_generator().get<DeviceGenerator>()->get_state()); });
  library.def("set_rng_state(Tensor state) -> ()", [](at::Tensor state) {
    default_generator().get<DeviceGenerator>()->set_state(*state.unsafeGetTensorImpl());
  });
  library.def("host_alias(Tensor(a) tensor) -> Tensor(a)");
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
}

TORCH_LIBRARY_IMPL(acc, PrivateUse1, library) { library.impl("host_alias", host_alias); }
