import os, sys, time, json, itertools, math, statistics
T0 = time.time()
OUT = os.environ["OUT"]
import torch
import torch.multiprocessing as mp
import fp4pass.kernels.fp8.triton as T, fp4pass.kernels.fp8.operands_triton as O
from fp4pass.kernels.fp8 import reference as R
from fp4pass.core.formats import get_format
import fp4pass

FMT = get_format("nvfp4")
TILES = {
    "A": T.Tiles(64, 64, 32, 4, 3), "B": T.Tiles(64, 64, 16, 4, 4), "C": T.Tiles(64, 128, 32, 8, 3),
    "D": T.Tiles(128, 64, 16, 4, 4), "E": T.Tiles(128, 128, 16, 8, 3), "F": T.Tiles(256, 64, 16, 4, 3),
    "G": T.Tiles(256, 128, 16, 8, 3), "H": T.Tiles(128, 64, 32, 4, 3), "I": T.Tiles(256, 128, 16, 8, 4), "J": T.Tiles(64, 64, 16, 4, 5),
}
SHAPES = ((14336, 4096), (4096, 4096), (4096, 14336), (9728, 2560))
KS = (4096, 14336, 2560)

def weight(n, k, seed=0):
    torch.manual_seed(seed)
    w = torch.randn(n, k, device="cuda") * 0.02
    g = FMT.global_scale_for(w.abs().max().item())
    d = torch.tensor([FMT.global_scale_of(g)], device="cuda")
    codes, scale = fp4pass.ops.quantize(w, d, "nvfp4")
    return w, T.Packed(codes, scale, d)

def jobs():
    out = []
    for k in KS:
        for name in TILES:
            for parts in (1, 2):
                out.append(("dec", k, name, parts, False))
    for name in "ADFG":
        out.append(("dec", 4096, name, 2, True))
    for k in KS:
        for warps in (1, 2):
            out.append(("exp", k, warps))
        for warps in (4, 8):
            for g, z in itertools.product((16, 32), (0, 8)):
                for releases in (False, True):
                    out.append(("ops", k, warps, g, z, releases))
            out.append(("ops", k, warps, 16, 8, False, False))
    return out

def do(job, x, w):
    if job[0] == "dec":
        _, k, name, parts, prefetch = job
        return T.decoded(x, w, None, torch.bfloat16, FMT, TILES[name], parts, prefetch)
    if job[0] == "exp":
        return O.expanded_operands(x, w, FMT, job[2])
    _, k, warps, g, z, releases, *fast = job
    O.TRIAL.update(warps=warps, releases=releases, fast=not fast)
    return O.decoded_operands(x, w, FMT, 8 * g, z)

def worker(i, count, q):
    todo = jobs()[i::count]
    made = {}
    try:
        for job in todo:
            k = job[1]
            if k not in made:
                made[k] = (torch.randn(512, k, device="cuda").bfloat16(), T.Packed(torch.randint(0, 255, (256, k // 2), device="cuda", dtype=torch.uint8), torch.randint(40, 60, (256, k // 16), device="cuda", dtype=torch.uint8), torch.ones(1, device="cuda")))
            O.TRIAL.update(warps=4, releases=False, fast=True)
            do(job, *made[k])
            torch.cuda.synchronize()
        q.put((i, "ok"))
    except Exception as e:
        q.put((i, f"{job} {type(e).__name__} {str(e)[:300]}"))

def left():
    return 71 - (time.time() - T0)

def graph_us(calls, reps=9):
    count = max(12, len(calls))
    s = torch.cuda.Stream(); s.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(s):
        for c in calls[:2]: c()
    torch.cuda.synchronize()
    g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g, stream=s):
        for i in range(count): calls[i % len(calls)]()
    ts = []
    for _ in range(reps):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record(); g.replay(); b.record(); torch.cuda.synchronize()
        ts.append(1e3 * a.elapsed_time(b) / count)
    del g
    return statistics.median(ts[1:])

def main():
    f = open(OUT + "/trial.jsonl", "w")
    def log(**kw):
        f.write(json.dumps({"t": round(time.time() - T0, 1), **kw}) + "\n"); f.flush()
    ctx = mp.get_context("spawn")
    q = ctx.Queue(); count = 15
    procs = [ctx.Process(target=worker, args=(i, count, q)) for i in range(count)]
    for p in procs: p.start()
    for _ in procs: log(worker=q.get())
    for p in procs: p.join()
    log(compiled=True)
    made = {}
    data = {}
    for n, k in SHAPES:
        w, p = weight(n, k)
        bytes = p.codes.nbytes + p.scale.nbytes
        copies = [T.Packed(p.codes.clone(), p.scale.clone(), p.global_scale) for _ in range(max(2, math.ceil(180e6 / bytes)))]
        dense = w.bfloat16(); denses = [dense.clone() for _ in range(max(2, math.ceil(180e6 / dense.nbytes)))]
        data[n, k] = (p, copies, denses)
    def check(y, x, ref, size):
        off = (y.float() - ref).abs() - 2.0**-8 * ref.abs()
        return (off / size).max().item()
    def measure(n, k, m, name, fn, ref=None, reps=9, **kw):
        p, copies, denses = data[n, k]
        try:
            err = None
            if ref is not None:
                y = fn(p); err = check(y, None, *ref)
                same = torch.equal(y, fn(p))
                kw["same"] = same
            us = graph_us([(lambda c=c: fn(c)) for c in copies], reps)
            log(n=n, k=k, m=m, what=name, us=round(us, 2), err=err, **kw)
        except Exception as e:
            log(n=n, k=k, m=m, what=name, failed=f"{type(e).__name__} {str(e)[:200]}", **kw)
    def dec_round(parts_of, ms):
        for (n, k), m in itertools.product(SHAPES, ms):
            if left() < 3: return
            torch.manual_seed(1)
            x = torch.randn(m, k, device="cuda").bfloat16()
            p, copies, denses = data[n, k]
            v, fx = R.quantize_rows_ref(x); e, fw = R.expand_ref(*p, FMT)
            ref = (v.float() @ e.float().t()) * fx[:, None] * fw
            size = (v.float().abs() @ e.float().abs().t()) * fx[:, None] * fw
            log(n=n, k=k, m=m, what="bf16", us=round(graph_us([(lambda d=d: torch.nn.functional.linear(x, d)) for d in denses]), 2))
            O.TRIAL["warps"] = 8 if k > 8192 else 4
            for name, t in TILES.items():
                if not (t.m < 2 * m and t.m * 4 >= m): continue
                for parts in (1, 2, 3, 4, 6, 8):
                    programs = -(-m // t.m) * -(-n // t.n) * parts
                    if programs > 800 or programs < 100 or k // 8 // t.words // parts < 4: continue
                    if parts in (3, 6) and programs > 420: continue
                    measure(n, k, m, "dec", lambda c: T.decoded(x, c, None, torch.bfloat16, FMT, t, parts, False), (ref, size), tile=name, parts=parts)
            if k == 4096:
                for name in "ADFG":
                    t = TILES[name]
                    if not (t.m < 2 * m and t.m * 4 >= m): continue
                    for pre, releases in ((True, False), (False, True), (True, True)):
                        O.TRIAL["releases"] = releases
                        measure(n, k, m, "dec", lambda c: T.decoded(x, c, None, torch.bfloat16, FMT, t, 2, pre), (ref, size), tile=name, parts=2, pre=pre, releases=releases)
                    O.TRIAL["releases"] = False
            for warps, fast in ((4, True), (8, True), (4, False), (8, False)):
                O.TRIAL.update(warps=warps, fast=fast)
                measure(n, k, m, "operands", lambda c: O.decoded_operands(x, c, FMT, 128, 8), warps=warps, fast=fast)
            O.TRIAL["fast"] = True
            for warps in (1, 2):
                measure(n, k, m, "exp+mm", lambda c: T.expanded(x, c, None, FMT, 1, warps), (ref, size), warps=warps)
    dec_round(None, (64, 128, 256, 512))
    for n, k in SHAPES:
        for warps in (1, 2):
            measure(n, k, 0, "expand", lambda c: O.expanded_operands(None, c, FMT, warps), warps=warps)
    for (n, k), m in itertools.product(SHAPES, (1024, 2048, 512, 8192)):
        if left() < 2: break
        x = torch.randn(m, k, device="cuda").bfloat16()
        p, copies, denses = data[n, k]
        if m > 512:
            log(n=n, k=k, m=m, what="bf16", us=round(graph_us([(lambda d=d: torch.nn.functional.linear(x, d)) for d in denses], 5), 2))
        v, fx = R.quantize_rows_ref(x); e, fw = R.expand_ref(*p, FMT)
        log(n=n, k=k, m=m, what="mm", us=round(graph_us([lambda: T.scaled_mm(v, e, fx, fw, None)], 5), 2))
        O.TRIAL["warps"] = 8 if k > 8192 else 4
        for chunks in (1, 2, 4):
            measure(n, k, m, "exp+mm", lambda c: T.expanded(x, c, None, FMT, chunks, 1), reps=5, chunks=chunks)
        for warps in (4, 8):
            O.TRIAL["warps"] = warps
            log(n=n, k=k, m=m, what="quantize", warps=warps, us=round(graph_us([lambda: O.make_rows(x, (None,) * 5, k, k, 0, FMT, 0)], 5), 2))
    log(done=True)

if __name__ == "__main__":
    main()
