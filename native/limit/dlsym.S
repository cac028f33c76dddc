/* SPDX-License-Identifier: Apache-2.0 */
/*
 * void *dlsym(void *handle, const char *symbol): dlsym_choose's answer, or else a jump to dlsym_next, the C library's or
 * that of another preloaded library, with the caller's return address still in place, which it reads for RTLD_NEXT.
 */
#ifdef DLSYM_FOR_GLIBC_ALONE
#define ENTRY dlsym_entry
#else
#define ENTRY dlsym
#endif
#if defined(__x86_64__)
        .text
        .globl  ENTRY
        .type   ENTRY, @function
ENTRY:
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
        call    dlsym_choose
        addq    $8, %rsp
        .cfi_adjust_cfa_offset -8
        popq    %rsi
        .cfi_adjust_cfa_offset -8
        popq    %rdi
        .cfi_adjust_cfa_offset -8
        cmpq    $-1, %rax
        je      1f
        ret
1:      jmp     *dlsym_next(%rip)
        .cfi_endproc
        .size   ENTRY, . - ENTRY
#elif defined(__aarch64__)
        .text
        .globl  ENTRY
        .type   ENTRY, %function
ENTRY:
        .cfi_startproc
        hint    #34
        stp     x29, x30, [sp, #-32]!
        .cfi_def_cfa_offset 32
        .cfi_offset 29, -32
        .cfi_offset 30, -24
        stp     x0, x1, [sp, #16]
        bl      dlsym_choose
        cmn     x0, #1
        b.eq    1f
        ldp     x29, x30, [sp], #32
        ret
1:      ldp     x0, x1, [sp, #16]
        ldp     x29, x30, [sp], #32
        adrp    x16, dlsym_next
        ldr     x16, [x16, #:lo12:dlsym_next]
        br      x16
        .cfi_endproc
        .size   ENTRY, . - ENTRY
#else
#error "preloaded libraries know x86-64 and aarch64"
#endif
#ifdef DLSYM_FOR_GLIBC_ALONE /* musl takes no symbol that has a version and is not its default */
        .globl  dlsym_now
        .set    dlsym_now, ENTRY
        .symver dlsym_now, dlsym@GLIBC_2.34
        .globl  dlsym_first
        .set    dlsym_first, ENTRY
#if defined(__x86_64__)
        .symver dlsym_first, dlsym@GLIBC_2.2.5
#else
        .symver dlsym_first, dlsym@GLIBC_2.17
#endif
#endif
        .section .note.GNU-stack, "", %progbits
