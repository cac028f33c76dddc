# ruff: noqa: B009, F821, RUF012
# After cudart.py: `kernel`, the function "add", registered as the compiler's start code does.
class Wrapper(c.Structure):
    _fields_ = [("magic", c.c_int), ("version", c.c_int), ("image", c.c_void_p), ("more", c.c_void_p)]


class Size(c.Structure):
    _fields_ = [("x", c.c_uint), ("y", c.c_uint), ("z", c.c_uint)]


image = c.create_string_buffer(bytes.fromhex("50ed55ba 0100 1000 3000000000000000"), 64)
wrapper, kernel = Wrapper(0x466243B1, 1, c.addressof(image), None), c.create_string_buffer(8)
register = getattr(rt, "__cudaRegisterFatBinary")
register.restype = c.c_void_p
module = c.c_void_p(register(c.byref(wrapper)))
getattr(rt, "__cudaRegisterFunction")(module, kernel, b"add", b"add", -1, None, None, None, None, None)
getattr(rt, "__cudaRegisterFatBinaryEnd")(module)
rt.cudaLaunchKernel.argtypes = [c.c_void_p, Size, Size, c.c_void_p, c.c_size_t, c.c_void_p]
