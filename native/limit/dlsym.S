/* SPDX-License-Identifier: Apache-2.0 */
/*
 * void *dlsym(void *handle, const char *symbol): limit_choose's answer, or else a jump to the C library's dlsym with the
 * caller's return address still in place, which that reads for RTLD_NEXT.
 */
#if defined(__x86_64__)
        .text
        .globl  dlsym
        .type   dlsym, @function
dlsym:
        .cfi_startproc
#ifdef __CET__
        endbr64
#endif
        pushq   %rdi
        .cfi_adjust_cfa_offset 8
        pushq   %rsi
        .cfi_adjust_cfa_offset 8
        subq    $8, %rsp
        .cfi_adjust_cfa_offset 8
        call    limit_choose
        addq    $8, %rsp
        .cfi_adjust_cfa_offset -8
        popq    %rsi
        .cfi_adjust_cfa_offset -8
        popq    %rdi
        .cfi_adjust_cfa_offset -8
        cmpq    $-1, %rax
        je      1f
        ret
1:      jmp     *limit_libc_dlsym(%rip)
        .cfi_endproc
        .size   dlsym, . - dlsym
#elif defined(__aarch64__)
        .text
        .globl  dlsym
        .type   dlsym, %function
dlsym:
        .cfi_startproc
        hint    #34
        stp     x29, x30, [sp, #-32]!
        .cfi_def_cfa_offset 32
        .cfi_offset 29, -32
        .cfi_offset 30, -24
        stp     x0, x1, [sp, #16]
        bl      limit_choose
        cmn     x0, #1
        b.eq    1f
        ldp     x29, x30, [sp], #32
        ret
1:      ldp     x0, x1, [sp, #16]
        ldp     x29, x30, [sp], #32
        adrp    x16, limit_libc_dlsym
        ldr     x16, [x16, #:lo12:limit_libc_dlsym]
        br      x16
        .cfi_endproc
        .size   dlsym, . - dlsym
#else
#error "the preloaded limiter knows x86-64 and aarch64"
#endif
        .section .note.GNU-stack, "", %progbits
