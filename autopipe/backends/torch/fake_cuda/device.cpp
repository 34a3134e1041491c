// A CUDA device that computes nothing, and says that it is the accelerator. It is what fake tensors on "cuda" need where
// there is no GPU: autograd has a thread for the device of each tensor, asks the hooks how many devices there are, and
// the guard for the device and the stream of each call.
#include <optional>

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/DeviceType.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;

const Device ONLY(DeviceType::CUDA, 0);

struct Guard : public c10::impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  Device exchangeDevice(Device) const override { return ONLY; }
  Device getDevice() const override { return ONLY; }
  Stream getStream(Device) const noexcept override { return Stream(Stream::DEFAULT, ONLY); }
  Stream exchangeStream(Stream) const noexcept override { return Stream(Stream::DEFAULT, ONLY); }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
};

Guard guard;

}  // namespace

// Called when torch is loaded: where it is built for CUDA, a guard of its own has taken the place meanwhile.
extern "C" __attribute__((visibility("default"))) void register_guard() {
  c10::impl::DeviceGuardImplRegistrar(DeviceType::CUDA, &guard);
}

namespace at {

struct CUDAHooks : public CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  // Torch built for CUDA asks before it chooses an attention kernel; none of cuDNN's is there.
  long versionCuDNN() const override { return 0; }
  long versionRuntimeCuDNN() const { return 0; }
  int getNumGPUs() const override { return 1; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  void deviceSynchronize(DeviceIndex) const override {}
  Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
};

// Rather than those of a torch that is built for CUDA.
C10_REGISTER_CLASS_WITH_PRIORITY(CUDAHooksRegistry, CUDAHooks, c10::REGISTRY_PREFERRED, CUDAHooks)

// These stand before torch's own, since this library is loaded before the one that has them.
namespace accelerator {

__attribute__((visibility("default"))) std::optional<DeviceType> getAccelerator(bool) { return DeviceType::CUDA; }
__attribute__((visibility("default"))) bool isAccelerator(DeviceType type) { return type == DeviceType::CUDA; }

}  // namespace accelerator
}  // namespace at
