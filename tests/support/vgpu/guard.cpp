// What torch takes only from C++: streams, events and pinned memory of the virtual GPU. Python is told of each call.
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <pybind11/pybind11.h>

#include <atomic>
#include <map>
#include <mutex>

namespace py = pybind11;
using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;
using c10::StreamId;

namespace {

constexpr int kMaxDevices = 16;
py::object* listener = nullptr;
int devices = 1;
thread_local DeviceIndex current_device = 0;
thread_local StreamId current_stream[kMaxDevices] = {0};
std::atomic<int64_t> streams{0}, events{0};

template <class Answer, class... Arguments>
Answer ask(const char* what, Arguments... arguments) {
  py::gil_scoped_acquire gil;
  return listener->attr(what)(arguments...).template cast<Answer>();
}

template <class... Arguments>
void tell(const char* what, Arguments... arguments) {
  if (listener == nullptr) return;
  py::gil_scoped_acquire gil;
  listener->attr(what)(arguments...);
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr DeviceType kType = DeviceType::PrivateUse1;

  static DeviceIndex index(Device device) { return device.index() < 0 ? current_device : device.index(); }
  static Stream stream(DeviceIndex device, StreamId id) { return Stream(Stream::UNSAFE, Device(kType, device), id); }

  DeviceType type() const override { return kType; }
  DeviceIndex deviceCount() const noexcept override { return devices; }
  Device getDevice() const override { return Device(kType, current_device); }
  void setDevice(Device device) const override { current_device = index(device); }
  void uncheckedSetDevice(Device device) const noexcept override { current_device = index(device); }
  Device exchangeDevice(Device device) const override {
    Device before(kType, current_device);
    current_device = index(device);
    return before;
  }

  // Stream 0 of each device is its default stream.
  Stream getStream(Device device) const override { return stream(index(device), current_stream[index(device)]); }
  Stream getDefaultStream(Device device) const override { return stream(index(device), 0); }
  Stream getNewStream(Device device, int priority = 0) const override {
    StreamId id = ++streams;
    tell("new_stream", id, priority);
    return stream(index(device), id);
  }
  Stream getStreamFromGlobalPool(Device device, bool high_priority = false) const override {
    return getNewStream(device, high_priority ? -1 : 0);
  }
  Stream exchangeStream(Stream next) const override {
    DeviceIndex device = index(next.device());
    Stream before = stream(device, current_stream[device]);
    current_stream[device] = next.id();
    return before;
  }
  void* getStreamNativeHandle(const Stream of) const override { return reinterpret_cast<void*>(of.id()); }
  bool queryStream(const Stream& of) const override { return ask<bool>("query_stream", of.id()); }
  void synchronizeStream(const Stream& of) const override { tell("synchronize_stream", of.id()); }
  void synchronizeDevice(DeviceIndex device) const override { tell("synchronize_device", int(device)); }

  void record(void** event, const Stream& on, DeviceIndex, c10::EventFlag) const override {
    if (*event == nullptr) *event = reinterpret_cast<void*>(++events);
    tell("record_event", reinterpret_cast<int64_t>(*event), on.id());
  }
  void block(void* event, const Stream& on) const override {
    if (event != nullptr) tell("wait_event", reinterpret_cast<int64_t>(event), on.id());
  }
  void destroyEvent(void*, DeviceIndex) const noexcept override {}
  bool queryEvent(void* event) const override {
    return event == nullptr || ask<bool>("query_event", reinterpret_cast<int64_t>(event));
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) tell("synchronize_event", reinterpret_cast<int64_t>(event));
  }
  double elapsedTime(void* begin, void* end, DeviceIndex) const override {
    return ask<double>("elapsed_ms", reinterpret_cast<int64_t>(begin), reinterpret_cast<int64_t>(end));
  }
  void recordDataPtrOnStream(const c10::DataPtr& memory, const Stream& on) const override {
    tell("record_pointer", reinterpret_cast<int64_t>(memory.get()), on.id());
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// Pinned host memory: ordinary memory whose ranges are remembered.
std::mutex pinned_lock;
std::map<const char*, size_t> pinned;

struct PinnedAllocator final : c10::Allocator {
  static void release(void* memory) {
    {
      std::lock_guard<std::mutex> hold(pinned_lock);
      pinned.erase(static_cast<const char*>(memory));
    }
    c10::GetCPUAllocator()->raw_deallocate(memory);
  }
  c10::DataPtr allocate(size_t size) override {
    void* memory = c10::GetCPUAllocator()->raw_allocate(size);
    std::lock_guard<std::mutex> hold(pinned_lock);
    pinned[static_cast<const char*>(memory)] = size;
    return {memory, memory, &release, Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* into, const void* from, size_t size) const override { default_copy_data(into, from, size); }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return devices; }
  DeviceIndex getCurrentDevice() const override { return current_device; }
  void setCurrentDevice(DeviceIndex device) const override { current_device = device; }
  Device getDeviceFromPtr(void*) const override { return Device(DeviceType::PrivateUse1, current_device); }
  bool isPinnedPtr(const void* pointer) const override {
    std::lock_guard<std::mutex> hold(pinned_lock);
    auto after = pinned.upper_bound(static_cast<const char*>(pointer));
    if (after == pinned.begin()) return false;
    --after;
    return static_cast<const char*>(pointer) < after->first + std::max<size_t>(1, after->second);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    static PinnedAllocator allocator;
    return &allocator;
  }
};

}  // namespace

PYBIND11_MODULE(vgpu_guard, module) {
  module.def("install", [](py::object told, int count) {
    devices = count;
    listener = new py::object(std::move(told));
    at::RegisterPrivateUse1HooksInterface(new Hooks());
  });
  module.def("current_stream", [] { return current_stream[current_device]; });
  module.def("current_device", [] { return int(current_device); });
}
