"""Four threads, each on its own stream, one weight between them: every fp8 product is right."""
import threading

from support import need, normal, served, sqnr

torch = need("torch")
F = torch.nn.functional
THREADS, TURNS = 4, 40
TOKENS, WIDTH, OUT = 256, 1024, 768


def work(index, shared, own, failures):
    try:
        with torch.cuda.stream(torch.cuda.Stream()), torch.no_grad():
            for turn in range(TURNS):
                x = normal(TOKENS + 8 * index, WIDTH, seed=100 * index + turn)
                own.copy_(normal(OUT, WIDTH, seed=1000 + 100 * index + turn))
                for weight in (shared, own):
                    y = F.linear(x, weight)
                    exact = x.double() @ weight.double().t()
                    db = sqnr(y.double(), exact)
                    assert db >= 26, f"thread {index}, turn {turn}: {db:.1f} dB"
    except BaseException as error:
        failures.append(error)


shared = normal(OUT, WIDTH, seed=1)
own = [normal(OUT, WIDTH, seed=2) for _ in range(THREADS)]
failures = []
F.linear(own[0], shared)  # the threads meet a library that is ready
torch.cuda.synchronize()
threads = [threading.Thread(target=work, args=(i, shared, own[i], failures))
           for i in range(THREADS)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
if failures:
    raise failures[0]
count, total = served(), 1 + THREADS * TURNS * 2
assert count == total, f"{count} of {total} products served by fp8"
