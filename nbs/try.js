// Two things to try on the page start/try: bars that are drawn from, and a sum tree. Nothing is asked of any server
(() => {
  "use strict";
  const make = (tag, attributes = {}, ...children) => {
    const o = document.createElementNS(["svg", "rect", "path"].includes(tag) ? "http://www.w3.org/2000/svg" : "http://www.w3.org/1999/xhtml", tag);
    for (const [k, v] of Object.entries(attributes)) k.startsWith("on") ? o.addEventListener(k.slice(2), v) : o.setAttribute(k, v);
    o.append(...children);
    return o;
  };
  const button = (words, onclick) => make("button", { type: "button", class: "btn btn-sm", onclick }, words);
  const slider = (words, name, min, max, step, value, change) => {
    const said = make("output", {}, String(value));
    const oninput = () => { said.textContent = input.value; change(+input.value); };
    const input = make("input", { type: "range", name, min, max, step, value, oninput });
    const label = make("label", {}, make("span", {}, words, " ", said), input);
    return Object.assign(label, { set: (v) => { input.value = v; said.textContent = input.value; }, input });
  };
  // Marsaglia's xorshift: the same numbers everywhere
  const generator = (x) => () => { x ^= x << 13; x ^= x >>> 17; x ^= x << 5; return (x >>> 0) / 2 ** 32; };
  const sum = (a) => a.reduce((x, y) => x + y, 0);
  // Which of the weights a dart hits: the first whose running sum exceeds it. One beyond the end hits the last that is not empty
  const find = (weights, target) => {
    let left = Math.min(target, sum(weights) * (1 - 2 ** -53)), k = 0;
    while (left >= weights[k]) left -= weights[k++];
    return [k, left];
  };

  // ---- fifty bars
  const bars = (root) => {
    const N = 50, BS = 32, W = 360, H = 130, first = generator(2463534242);
    const priorities = Array.from({ length: N }, () => { const u = first(); return .02 + .98 * u * u * u; });
    let alpha = .6, beta = .4, chosen = 0, random, counts, batches;
    const svg = make("svg", { viewBox: `0 0 ${W} ${2 * H + 24}`, role: "img", class: "drawing" });
    const parts = priorities.map((_, k) => {
      const x = 5 + 7 * k;
      const [P, drawn, w, hit] = [{ fill: "#ff7f0e", "fill-opacity": .45 }, { fill: "none", stroke: "currentColor", "stroke-width": 1.6 }, { fill: "currentColor", "fill-opacity": .45 },
        { x: x - 1, y: 0, width: 7, height: 2 * H + 24, fill: "transparent", onclick: () => look(k) }].map((o, i) => make(i === 1 ? "path" : "rect", { width: 5, x, ...o }));
      svg.append(hit, P, drawn, w);
      hit.style.cursor = "pointer";
      return { P, drawn, w, hit, x };
    });
    const about = make("output", { class: "try-said", "aria-live": "polite" }), all = make("output", { class: "try-said", "aria-live": "polite" });
    const law = () => {
      const leaves = priorities.map((p) => p ** alpha), total = sum(leaves), least = Math.min(...leaves);
      return [leaves, leaves.map((o) => o / total), leaves.map((o) => (least / o) ** beta)];
    };
    const show = () => {
      const [, P, w] = law(), most = Math.max(.08, ...P, ...counts.map((n) => n / (batches * BS || 1)));
      parts.forEach((o, k) => {
        const h = P[k] / most * H, d = counts[k] / (batches * BS || 1) / most * H, v = w[k] * H;
        o.P.setAttribute("height", h), o.P.setAttribute("y", H - h);
        o.drawn.setAttribute("d", batches ? `M${o.x - 1} ${(H - d).toFixed(1)}h7` : "");
        o.w.setAttribute("height", v), o.w.setAttribute("y", 2 * H + 22 - v);
        o.hit.setAttribute("fill", k === chosen ? "rgba(128,128,128,.3)" : "transparent");
      });
      const never = counts.filter((n) => !n).length;
      all.textContent = `The likeliest is drawn ${(Math.max(...P) * N).toFixed(2)} times as often as by uniform replay, the unlikeliest ${(Math.min(...P) * N).toFixed(2)} times. `
        + `The least weight is ${Math.min(...w).toFixed(3)}. ${batches * BS} rows are drawn, ${never} of ${N} transitions never.`;
      about.textContent = `Transition ${chosen}: priority ${priorities[chosen].toFixed(3)}, probability ${(100 * P[chosen]).toFixed(2)} %, weight ${w[chosen].toFixed(3)}, drawn ${counts[chosen]} times.`;
      svg.setAttribute("aria-label", `Fifty bars for probabilities, and fifty for weights. ${all.textContent}`);
    };
    const again = () => { random = generator(123456789); counts = priorities.map(() => 0); batches = 0; show(); };
    const draw = (n) => {
      const [leaves] = law(), total = sum(leaves);
      for (; n; n--, batches++) for (let i = 0; i < BS; i++) counts[find(leaves, (i + random()) / BS * total)[0]]++;      // one row of each stratum
      show();
    };
    const look = (k) => { chosen = k; which.set(k); show(); };
    const which = slider("look at transition", "which", 0, N - 1, 1, 0, look);
    root.append(
      make("div", { class: "try-controls" }, slider("α, how much priorities count:", "alpha", 0, 1, .05, alpha, (v) => { alpha = v; again(); }),
        slider("β, how much weights correct:", "beta", 0, 1, .05, beta, (v) => { beta = v; show(); })),
      make("p", { class: "try-key" }, "Above, orange: probability. Lines: share of the rows drawn. Below, grey: importance weight."), svg,
      make("div", { class: "try-controls" }, button("draw a batch of 32", () => draw(1)), button("draw 100 batches", () => draw(100)), button("start again", again), which), about, all);
    again();
  };

  // ---- a sum tree
  const tree = (root) => {
    const leaves = [2, 3, 0, 4, 5, 1, 6, 2, 0, 1, 4, 1, 3, 3, 0, 5];
    let target = 17.5, level = 0, chosen = 6;
    const random = generator(362436069), total = make("output", { class: "try-node" }), said = make("ol", { "aria-live": "polite" });
    const leaf = leaves.map((_, k) => make("button", { type: "button", class: "try-leaf", onclick: () => { chosen = k; weight.set(leaves[k]); show(); } }));
    const groups = [0, 1, 2, 3].map((g) => make("output", { class: "try-node" }));
    const sums = () => groups.map((_, g) => sum(leaves.slice(4 * g, 4 * g + 4)));
    const ends = (a) => a.map((_, k) => sum(a.slice(0, k + 1)));
    const passes = (a, target, what) => {
      const [k, left] = find(a, target), list = ends(a);
      return [k, left, `${what}: the running sums are ${list.join(", ")}. ${k || "None"} of them ${k === 1 ? "does" : "do"} not exceed ${target}`];
    };
    const show = () => {
      const top = sums();
      const [g, left, words] = passes(top, target, "At the top"), [k, , more] = passes(leaves.slice(4 * g, 4 * g + 4), left, "Below it");
      total.textContent = `total ${sum(top)}`;
      total.classList.toggle("on", level >= 0);
      groups.forEach((o, i) => { o.textContent = top[i]; o.classList.toggle("on", level > 0 && i === g); });
      leaf.forEach((o, i) => {
        o.textContent = leaves[i];
        o.setAttribute("aria-label", `slot ${i}: weight ${leaves[i]}`);
        o.setAttribute("aria-pressed", String(i === chosen));
        o.classList.toggle("on", level > 1 && i === 4 * g + k);
      });
      dart.input.max = sum(top);
      weight.firstChild.firstChild.textContent = `weight of slot ${chosen}:`;
      const empty = !sum(top);
      said.replaceChildren(...(empty ? ["All weights are zero: there is nothing to draw."] : [`A dart at ${target}, of 0 to ${sum(top)}.`,
        `${words}: child ${g}, with ${left} left.`, `${more}: slot ${4 * g + k}.`].slice(0, level + 1)).map((o) => make("li", {}, o)));
      down.disabled = empty || level > 1;
    };
    const aim = (v) => { target = v; level = 0; show(); };
    const dart = slider("dart at", "dart", 0, sum(leaves), .5, target, aim);
    const weight = slider("weight of slot 6:", "weight", 0, 9, 1, leaves[chosen], (v) => {
      leaves[chosen] = v;      // the sums above are computed again from their children
      if (target >= sum(leaves)) { target = Math.max(0, sum(leaves) - .5); dart.input.max = sum(leaves); dart.set(target); }
      level = 0;
      show();
    });
    const down = button("one level down", () => { level++; show(); });
    root.append(total, make("div", { class: "try-groups" }, ...groups.map((o, g) => make("div", { class: "try-group" }, o, make("div", {}, ...leaf.slice(4 * g, 4 * g + 4))))),
      make("div", { class: "try-controls" }, dart, button("throw a dart", () => { const v = Math.floor(random() * sum(leaves) * 2) / 2; dart.set(v); aim(v); }), down, weight), said);
    show();
  };

  for (const [id, start] of [["try-bars", bars], ["try-tree", tree]]) {
    const root = document.getElementById(id);
    if (root) { root.replaceChildren(); start(root); }
  }
})();
