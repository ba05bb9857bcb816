// What the pages of this site do beyond their generator's own scripts. tools/finish.py writes the index of the search
(() => {
  "use strict";
  const $ = (query, root = document) => root.querySelector(query);

  // ---- the sidebar shows where the reader is, and its sections open and close
  const sidebar = $("#quarto-sidebar"), here = $("#quarto-sidebar a.active");
  if (sidebar && here) sidebar.scrollTop += here.getBoundingClientRect().top - sidebar.getBoundingClientRect().top - sidebar.clientHeight / 3;
  const say = (button, open) => button.setAttribute("aria-expanded", String(open));
  document.querySelectorAll("button.sidebar-link").forEach((o) => o.addEventListener("click", () =>
    say(o, document.getElementById(o.getAttribute("aria-controls")).classList.toggle("show"))));
  const opener = $(".quarto-btn-toggle"), tell = () => say(opener, sidebar.classList.contains("show"));
  if (opener && sidebar) {      // on a phone the sidebar itself opens, by the generator's script
    tell();
    new MutationObserver(tell).observe(sidebar, { attributes: true, attributeFilter: ["class"] });
    sidebar.addEventListener("keydown", (event) => { if (event.key === "Escape" && sidebar.classList.contains("show")) { opener.click(); opener.focus(); } });
  }

  // ---- a link to folded source opens it
  const unfold = () => {
    const at = document.getElementById(decodeURIComponent(location.hash.slice(1)));
    const fold = at && at.matches(".cell") && $("details.code-fold", at);
    if (fold) { fold.open = true; at.scrollIntoView(); }
  };
  window.addEventListener("hashchange", unfold);
  unfold();

  // ---- a figure that is touched on a phone becomes larger, and small again
  const text = $("main");
  if (text) text.addEventListener("click", (event) => { if (event.target.matches("img")) event.target.classList.toggle("large"); });

  // ---- a drawing that moves can be stopped, and does not move for who wants no motion
  document.querySelectorAll("svg.moving").forEach((o) => {
    const toggle = () => o.animationsPaused() ? o.unpauseAnimations() : o.pauseAnimations();
    const button = document.createElement("button");
    button.className = "stop btn btn-sm";
    button.textContent = "pause or resume";
    button.addEventListener("click", toggle);
    o.after(button);
    if (matchMedia("(prefers-reduced-motion: reduce)").matches) { o.setCurrentTime(+o.dataset.still); o.pauseAnimations(); }
  });

  // ---- search: names count most, rare words more than common ones, entries of the reference for users come first
  const box = $(".smalldocs-search");
  if (!box) return;
  const input = $("input", box), results = $(".smalldocs-search-results", box);
  const offset = ($('meta[name="smalldocs:offset"]') || { content: "./" }).content;
  const COMMON = new Set("a all an and are as at be by can could do does for from get have how i in is it me my not of on or should so that the there this to use want was what when where which who why will with you your".split(" "));
  // what people type, and what the pages say; "=": and nothing else
  const SYNONYMS = {
    per: "= prioritized proportional", prioritized: "prioritizedreplay proportional", schaul: "prioritized proportional", ppo: "algorithm", a2c: "algorithm ppo", sac: "actor-critic", td3: "algorithm",
    oom: "= ram estimate", delete: "drop", remove: "drop delete", forget: "drop clear", discard: "drop", filter: "where drop", reset: "clear empty", multi: "several",
    transformer: "sequences recurrent", lstm: "recurrent sequences", gru: "recurrent sequences", rnn: "recurrent sequences", drqn: "recurrent", r2d2: "recurrent sequences",
    wandb: "weights-biases", mlflow: "tensorboard", logging: "tensorboard log", monitor: "tensorboard health", quickstart: "install overview", tutorial: "tutorials", beginner: "install overview",
    started: "install overview", example: "overview tutorials", resize: "max_sz capacity", grow: "max_sz capacity", capacity: "max_sz", size: "max_sz",
    cite: "citation licence", citation: "cite", bibtex: "cite", license: "licence apache", licence: "apache", github: "checkout clone", repo: "checkout clone", repository: "checkout clone",
    gpus: "gpu cuda", multigpu: "gpu cuda", cuda: "gpu", gpu: "device", distributed: "cluster machines ray", multinode: "cluster machines ray", parallel: "actors processes", worker: "actors workers", workers: "actors",
    her: "hindsight", mixing: "mixed mix offline", mix: "mixed mixing", d4rl: "minari", dataset: "minari recorded", demonstrations: "mixed demos recorded", demonstration: "mixed demos recorded", demos: "mixed demonstrations recorded",
    rlpd: "mixed-demos mixed-offline mixed", hybrid: "mixed", imitation: "recorded offline", chunking: "windows chunks", chunks: "windows", history: "windows", histories: "windows history", framestack: "frames windows", stack: "frames windows",
    mask: "action_mask illegal", masks: "mask illegal", masking: "mask illegal", invalid: "illegal", isaaclab: "= device", isaacgym: "= device", isaac: "= device", brax: "= device", mjx: "= device", maniskill: "= device", simulator: "device",
    swd: "= age", recency: "age recent", decay: "age schedule", string: "= strings", str: "= strings", text: "strings", texts: "strings", language: "strings", instruction: "strings", instructions: "strings", gym: "gymnasium", ram: "memory",
    benchmark: "compared measured", fast: "compared cost", slow: "seconds cost", crash: "killed", checkpoint: "save", resume: "resume save", importance: "weights", td: "error errors", datapipe: "datapipes",
  };
  const LIMIT = 20;
  let entries = null, active = -1, last = 0;

  const escape = (s) => s.replace(/[&<>"']/g, (c) => `&#${c.charCodeAt(0)};`);
  const stem = (word) => word.replace(/(ies|y|es|s|e|ing|ed)$/, (end, _, at) => at < 3 ? end : "");
  const split = (text, between = /[^\p{L}\p{N}_]+/u) => text.split(between).filter(Boolean);
  // British forms: prioritised, normalisation, behaviour; the pages have American ones
  const american_of = (word) => {
    const found = word.replace(/is(e|ed|es|er|ers|ing|ation|ations)$/, "iz$1").replace(/our(s|al)?$/, "or$1").replace(/([ae])lling$/, "$1ling");
    return found === word ? "" : found;
  };
  const asked = (text) => split(text.toLowerCase()).map((o) => o.replace(/_/g, ""));
  const words = (text) => split(text).flatMap((o) => {      // ReplayMemory is found as replaymemory, replay and memory; max_sz as maxsz, max and sz
    const parts = split(o.replace(/([a-z0-9])([A-Z])/g, "$1 $2").toLowerCase(), /[ _]+/);
    return parts.length > 1 ? [parts.join(""), ...parts] : parts;
  });

  const load = () => entries ? Promise.resolve() : new Promise((done, fail) => {
    const script = document.createElement("script");        // a script may be read from a disk, where nothing may be fetched
    script.onload = () => {
      const module = (e) => e.href.startsWith("reference/modules/") ? "fastrl_replay." + e.href.replace(/^reference\/modules\/|\.html.*$/g, "").replaceAll("/", ".") : "fastrl_replay.all";
      entries = window.searchIndex.map((o) => o.title ? o : { ...o, title: module(o) }).map((e) => ({
        text: "", ...e, head: e.name || e.section || e.title, about: words(`${e.title} ${e.name || ""}`),
        names: words(e.name ? e.name.split(".").pop() : e.section || e.title),      // a method is named by its own name, and is about its class
        body: " " + words(`${e.text || ""} ${e.more || ""}`).join(" ") + " ",
      }));
      done();
    };
    script.onerror = fail;
    script.src = offset + "search.js";
    document.head.append(script);
  });

  const bare = (name) => name.replace(/[^\p{L}\p{N}.]/gu, "");

  const scoreOfWord = (e, word) => {
    if (e.names.includes(word)) return 10;
    if (word.includes(" ")) return e.names.join(" ").includes(word) ? 9 : e.body.includes(` ${word} `) ? 4 : 0;      // steps_per_batch, in words
    const root = word.length < 3 ? word + " " : stem(word);
    if (e.names.some((o) => o.startsWith(root))) return 9;
    if (e.about.some((o) => o.startsWith(root))) return 6;
    if (e.body.includes(" " + word + " ")) return 4;
    return e.body.includes(" " + root) ? 2 : 0;
  };

  // a synonym may have several words, which must all occur
  const scoreOfTerm = (e, { word, meant }) => Math.max(word && scoreOfWord(e, word), ...meant.map((all) => .8 * Math.min(...all.map((o) => scoreOfWord(e, o)))));

  const search = (text) => {
    const query = text.trim().toLowerCase().replace(/\(\)$/, "").replace(/out of (memory|ram)/, "oom"), all = split(query);
    const telling = all.filter((o) => !COMMON.has(o));
    const terms = (telling.length ? telling : all).map((asked) => asked in SYNONYMS ? asked : american_of(asked) || asked).map((typed) => {
      const [only, said] = (SYNONYMS[typed] || "").match(/^(= )?(.*)/).slice(1), parts = split(typed, /_+/);
      return { word: only ? "" : parts.join(""), meant: [...(parts.length > 1 ? [[parts.join(" ")]] : []), ...said.split(" ").filter(Boolean).map((o) => asked(o.replace("-", " ")))] };
    });
    const question = terms.length < all.length;
    const each = entries.map((e) => terms.map((o) => scoreOfTerm(e, o)));
    const rarity = terms.map((_, k) => { const n = each.filter((o) => o[k]).length; return n && Math.log(1 + entries.length / n); });
    const whole = rarity.reduce((a, b) => a + b, 0);
    const found = entries.map((e, i) => {
      const share = rarity.reduce((sum, r, k) => sum + (each[i][k] && r), 0) / whole;      // of what was asked, as far as any page has it
      if (!(share > 0)) return [0, e];
      let sum = rarity.reduce((total, r, k) => total + r * each[i][k], 0) / whole * share * share;
      const name = e.head.toLowerCase();
      if (bare(name) === bare(query) && e.weight > .5) sum += 20;      // what serves the library itself may be called as a reader calls something else
      else if (e.name && name.split(".").pop() === query) sum += 12;
      if (terms.length > 1 && e.body.includes(" " + terms.map((o) => o.word).join(" "))) sum += 2;
      if (question && !e.name) sum *= 1.5;      // a question is answered by a page rather than by an entry of the reference
      return [sum * e.weight - share * e.names.length / 10, e];
    }).sort((a, b) => b[0] - a[0]);
    const enough = found.length ? found[0][0] / 5 : 0;
    const shown = new Set(terms.flatMap((o) => [o.word, ...o.meant.flat()]).filter(Boolean));
    return [found.filter(([s]) => s > 0 && s >= enough).slice(0, LIMIT).map(([, e]) => e), [...shown]];
  };

  const snippet = (text, terms) => {
    const marks = terms.map((o) => stem(o).replace(/[.*+?^${}()|[\]\\]/g, "\\$&")).join("|");
    const at = Math.max(0, text.search(new RegExp(`(?<![\\p{L}\\p{N}])(${marks})`, "iu")) - 60);
    const part = escape(text.slice(at, at + 200));
    return (at ? "…" : "") + part.replace(new RegExp(`(?<![\\p{L}\\p{N}&#])(${marks})`, "giu"), "<mark>$1</mark>");
  };

  const row = (e, terms, k) => `<a class="search-result" role="option" aria-selected="false" tabindex="-1" id="search-result-${k}" href="${offset}${e.href}">`
    + `<div class="search-result-title">${e.name ? `<code>${escape(e.head)}</code>` : escape(e.head)}</div>`
    + (e.head !== e.title ? `<div class="search-result-section">${escape(e.title)}</div>` : "")
    + `<div class="search-result-text">${snippet(e.text, terms)}</div></a>`;

  // a box with a list, as WAI-ARIA describes it, and a line that is read aloud
  const set = (o, attributes) => Object.entries(attributes).forEach(([k, v]) => o.setAttribute(k, v));
  const status = document.createElement("span");
  set(status, { role: "status", class: "visually-hidden" });
  box.append(status);
  set(results, { id: "search-results", role: "listbox", "aria-label": "Search results" });
  set(input, { role: "combobox", "aria-autocomplete": "list", "aria-controls": "search-results", "aria-expanded": "false", title: "Press / to search" });

  const open = (yes) => {
    results.classList.toggle("show", yes);
    say(input, yes);
    input.removeAttribute("aria-activedescendant");
    active = -1;
  };

  const show = async () => {
    const mine = ++last;
    if (asked(input.value).join("").length < 2) return open(false);
    await load();
    if (mine !== last) return;
    const [found, terms] = search(input.value);
    results.innerHTML = found.length ? found.map((e, k) => row(e, terms, k)).join("") : '<div class="search-none">No results</div>';
    status.textContent = found.length ? `${found.length} result${found.length > 1 ? "s" : ""}` : "No results";
    open(true);
  };

  const move = (by) => {
    const rows = Array.from(results.querySelectorAll(".search-result"));
    if (!rows.length) return;
    active = (active + by + rows.length) % rows.length;
    rows.forEach((o, i) => { o.classList.toggle("active", i === active); o.setAttribute("aria-selected", String(i === active)); });
    input.setAttribute("aria-activedescendant", rows[active].id);
    rows[active].scrollIntoView({ block: "nearest" });
  };

  const keys = {
    ArrowDown: () => move(1), ArrowUp: () => move(active < 0 ? 0 : -1),
    Enter: () => { const o = results.querySelectorAll(".search-result")[Math.max(active, 0)]; if (o) o.click(); },
    Escape: () => { open(false); input.blur(); },
  };

  // before the generator's own handlers, and instead of them
  const instead = (kind, act) => document.addEventListener(kind, (event) => {
    if (event.target !== input) return;
    event.stopPropagation();
    act(event);
  }, true);
  document.addEventListener("keydown", (event) => {
    if (event.key !== "/" || event.ctrlKey || event.metaKey || event.target.closest("input, textarea")) return;
    event.preventDefault();
    input.focus();
  });
  instead("input", show);
  instead("focus", () => { load(); show(); });
  instead("keydown", (event) => {
    if (!keys[event.key]) return;
    event.preventDefault();
    keys[event.key]();
  });
  box.addEventListener("focusout", (event) => { if (!box.contains(event.relatedTarget)) open(false); });
})();
