// The player: steps through a recorded run that docs/_hooks/players.py has put into window.minivllmRuns.
// Keys, while the player has the focus: arrows or n and p, space, Home, End, f for the next failure.
(() => {
  "use strict";
  if (window.minivllmPlayer) return;

  const TEXTS = {
    en: {
      player: "A recorded run, step by step. Arrow keys: next and previous step; space: play; f: next failure",
      first: "first step", previous: "previous step", play: "play", pause: "pause", next: "next step", last: "last step",
      failure: "next failure", position: "step", speed: "speed", of: "of", why: "why: ", articles: "articles ",
      futures: "futures", slot: "slot", nothing: "changes nothing that is shown here", noFailure: "no failure from here on",
      keys: "click here, then → ← step, space plays", failureKey: ", f finds the next failure",
    },
    zh: {
      player: "逐步回放录制的运行。方向键：下一步与上一步；空格：播放；f：下一处故障",
      first: "第一步", previous: "上一步", play: "播放", pause: "暂停", next: "下一步", last: "最后一步",
      failure: "下一处故障", position: "步骤", speed: "速度", of: "/", why: "为什么：", articles: "文章 ",
      futures: "futures", slot: "槽", nothing: "此处显示的状态没有变化", noFailure: "之后没有故障",
      keys: "点一下这里，然后 → ← 单步，空格播放", failureKey: "，f 找下一处故障",
    },
  };
  const INTERVALS_MS = { "1×": 900, "4×": 225, "16×": 56 };
  const MARKS = {
    "not started": "·", starting: "▹", working: "▶", waiting: "‖", idle: "○", ending: "▽", ended: "□", dead: "✖",
  };
  const SLOTS = { ".": "never written", o: "read by all", w: "being written", W: "written, unread", r: "read by some" };

  function element(name, className, text) {
    const made = document.createElement(name);
    if (className) made.className = className;
    if (text !== undefined) made.textContent = text;
    return made;
  }

  class Player {
    constructor(root, run, texts) {
      this.root = root;
      this.run = run;
      this.say = texts;
      this.index = 0;
      this.timer = 0;
      this.state = new Map(Object.entries(run.before).map(([key, number]) => [key, run.texts[number]]));
      this.apply(run.steps[0], true);
      this.build();
      this.draw();
    }

    // --- moving

    apply(step, forward) {
      for (const [key, before, after] of step.changes) {
        const text = this.run.texts[forward ? after : before];
        if (text === "") this.state.delete(key);
        else this.state.set(key, text);
      }
    }

    go(index) {
      index = Math.max(0, Math.min(index, this.run.steps.length - 1));
      while (this.index < index) this.apply(this.run.steps[++this.index], true);
      while (this.index > index) this.apply(this.run.steps[this.index--], false);
      this.draw();
    }

    goToFailure() {
      const found = this.run.steps.findIndex((step, index) => index > this.index && step.failed);
      if (found < 0) this.count.textContent = this.say.noFailure;
      else this.go(found);
    }

    play(on) {
      clearInterval(this.timer);
      this.timer = on
        ? setInterval(() => {
            if (this.index + 1 < this.run.steps.length) this.go(this.index + 1);
            if (this.index + 1 >= this.run.steps.length) this.play(false);
          }, INTERVALS_MS[this.speed.value])
        : 0;
      this.buttons.play.textContent = on ? "❚❚" : "▶";
      this.buttons.play.setAttribute("aria-label", on ? this.say.pause : this.say.play);
      this.buttons.play.title = on ? this.say.pause : this.say.play;
    }

    toggle() {
      if (!this.timer && this.index + 1 >= this.run.steps.length) this.go(0);
      this.play(!this.timer);
    }

    press(event) {
      if (event.altKey || event.ctrlKey || event.metaKey) return;
      const onControl = event.target.tagName === "BUTTON" || event.target.tagName === "SELECT";
      if (event.target.tagName === "SELECT" && event.key !== "n" && event.key !== "p") return;
      const actions = {
        ArrowRight: () => this.step(1), n: () => this.step(1), ArrowLeft: () => this.step(-1), p: () => this.step(-1),
        Home: () => this.step(-Infinity), End: () => this.step(Infinity), f: () => this.goToFailure(),
      };
      if (!onControl) actions[" "] = () => this.toggle();
      const action = actions[event.key];
      if (!action) return;
      // The page has keys of its own: n and p turn the page.
      event.preventDefault();
      event.stopPropagation();
      action();
    }

    step(by) {
      this.play(false);
      this.go(this.index + by);
    }

    // --- drawing

    build() {
      const { root, say } = this;
      root.textContent = "";
      root.tabIndex = 0;
      root.setAttribute("role", "group");
      root.setAttribute("aria-label", say.player);
      root.addEventListener("keydown", (event) => this.press(event));
      const bar = element("div", "player-bar");
      this.buttons = {};
      const controls = [
        ["first", "⇤", () => this.step(-Infinity)], ["previous", "←", () => this.step(-1)], ["play", "▶", () => this.toggle()],
        ["next", "→", () => this.step(1)], ["last", "⇥", () => this.step(Infinity)], ["failure", "✖", () => this.goToFailure()],
      ];
      for (const [name, glyph, act] of controls) {
        const button = element("button", `player-${name}`, glyph);
        button.type = "button";
        button.title = say[name];
        button.setAttribute("aria-label", say[name]);
        button.addEventListener("click", act);
        this.buttons[name] = button;
        bar.append(button);
      }
      const hasFailure = this.run.steps.some((step) => step.failed);
      this.buttons.failure.hidden = !hasFailure;
      this.speed = element("select");
      this.speed.setAttribute("aria-label", say.speed);
      for (const name of Object.keys(INTERVALS_MS)) this.speed.append(element("option", "", name));
      this.speed.addEventListener("change", () => this.timer && this.play(true));
      this.slider = element("input");
      Object.assign(this.slider, { type: "range", min: 1, max: this.run.steps.length, value: 1 });
      this.slider.setAttribute("aria-label", say.position);
      this.slider.addEventListener("input", () => {
        this.play(false);
        this.go(Number(this.slider.value) - 1);
      });
      this.count = element("span", "player-count");
      bar.append(this.speed, this.slider, this.count);
      this.event = element("p", "player-event");
      this.event.setAttribute("aria-live", "polite");
      const body = element("div", "player-body");
      this.left = element("div", "player-left");
      this.right = element("div", "player-right");
      body.append(this.left, this.right);
      this.below = element("div", "player-below");
      const keys = element("p", "player-keys", say.keys + (hasFailure ? say.failureKey : ""));
      root.append(bar, this.event, body, this.below, keys);
    }

    draw() {
      const step = this.run.steps[this.index];
      const changed = new Set(step.changes.map(([key]) => key));
      this.slider.value = this.index + 1;
      this.count.textContent = `${this.index + 1} ${this.say.of} ${this.run.steps.length} · ${step.time}`;
      this.root.dataset.step = this.index + 1;
      this.event.replaceChildren(...this.headline(step));
      this.left.replaceChildren(
        ...this.run.processes.map((process, number) => this.process(process, number, step, changed)),
        ...this.rings(changed),
        ...this.notes(changed),
      );
      this.right.replaceChildren(...this.source(this.run.places[step.place]));
      const lines = this.right.querySelector("pre");
      const here = this.right.querySelector(".player-here");
      if (lines && here) lines.scrollTop = here.offsetTop - lines.clientHeight / 3;
      this.below.replaceChildren(...this.explanation(step));
    }

    headline(step) {
      const process = this.run.processes[step.process];
      const name = element("b", "", process.name);
      name.style.color = process.color;
      const at = step.event.indexOf(process.name);
      if (at < 0) return [step.event];
      return [step.event.slice(0, at), name, step.event.slice(at + process.name.length)];
    }

    process(process, number, step, changed) {
      const [kind, text, note, detail] = (this.state.get(`p${number}`) || "not started\t\t\t").split("\t");
      const classes = ["player-process", `player-${kind.replace(" ", "-")}`];
      if (step.process === number) classes.push("player-now");
      if (changed.has(`p${number}`)) classes.push("player-changed");
      const box = element("div", classes.join(" "));
      const name = element("b", "", `${MARKS[kind] || ""} ${process.name}`);
      name.style.color = process.color;
      box.append(name, element("span", "", ` ${[text, note, detail].filter(Boolean).join("; ")}`));
      box.style.borderLeftColor = process.color;
      return box;
    }

    rings(changed) {
      const rings = new Map();
      for (const [key, text] of this.state) {
        if (!key.startsWith("r")) continue;
        const [queue, slot] = key.slice(1).split("\t");
        if (!rings.has(queue)) rings.set(queue, []);
        const [letter, what] = text.split("\t");
        rings.get(queue).push({ slot: Number(slot), letter, what, changed: changed.has(key) });
      }
      return [...rings].map(([queue, slots]) => {
        const box = element("div", "player-ring");
        box.append(element("b", "", queue));
        const strip = element("div", "player-slots");
        for (const { slot, letter, what, changed: isNew } of slots.sort((a, b) => a.slot - b.slot)) {
          const cell = element("span", `player-slot player-slot-${letter === "." ? "empty" : letter}`, letter);
          if (isNew) cell.classList.add("player-changed");
          cell.title = `${this.say.slot} ${slot}: ${what || SLOTS[letter]}`;
          strip.append(cell);
        }
        box.append(strip);
        for (const { slot, what } of slots) if (what) box.append(element("div", "", `${this.say.slot} ${slot}: ${what}`));
        return box;
      });
    }

    notes(changed) {
      return [...this.state]
        .filter(([key]) => key.startsWith("pipes") || key === "futures")
        .map(([key, text]) => {
          const line = element("div", `player-note${changed.has(key) ? " player-changed" : ""}`);
          line.append(element("b", "", key === "futures" ? this.say.futures : key), ` ${text}`);
          return line;
        });
    }

    source(place) {
      const title = element("div", "player-path", place.line ? `${place.path}:${place.line}` : place.path);
      title.append(element("span", "", ` ${place.function}`));
      if (!place.lines.length) return [title, element("p", "", place.note)];
      const lines = element("pre");
      place.lines.forEach((text, number) => {
        const isHere = place.first + number === place.line;
        const line = element("div", isHere ? "player-here" : "");
        line.append(element("span", "player-number", String(place.first + number)), text || " ");
        lines.append(line);
      });
      const parts = [title, lines];
      if (place.note) parts.push(element("p", "player-faint", place.note));
      if (place.why) parts.push(element("p", "player-why", this.say.why + place.why));
      return parts;
    }

    explanation(step) {
      const { texts } = this.run;
      const parts = [element("p", "", texts[step.what])];
      if (texts[step.error]) parts.push(element("p", "player-error", texts[step.error]));
      const changes = step.changes.filter(([key]) => key.startsWith("p") && !key.startsWith("pipes"));
      for (const [key, before, after] of changes) {
        const words = (number) => texts[number].split("\t").slice(1, 3).filter(Boolean).join(", ");
        if (words(before) !== words(after)) {
          const name = this.run.processes[Number(key.slice(1))].name;
          parts.push(element("p", "player-change", `${name}: ${words(before)} → ${words(after)}`));
        }
      }
      const articles = [texts[step.articles] && this.say.articles + texts[step.articles], texts[step.vllm] && `vLLM 0.25.1 ${texts[step.vllm]}`];
      parts.push(element("p", "player-faint", articles.filter(Boolean).join("; ")));
      if (step.attributes) parts.push(element("p", "player-faint", step.attributes));
      return parts;
    }
  }

  function start() {
    const language = document.documentElement.lang.startsWith("zh") ? "zh" : "en";
    const players = [];
    for (const root of document.querySelectorAll(".player[data-player]")) {
      const run = (window.minivllmRuns || {})[root.dataset.player];
      if (run) players.push(new Player(root, run, TEXTS[language]));
    }
    document.addEventListener("visibilitychange", () => {
      if (document.hidden) for (const player of players) player.play(false);
    });
    window.minivllmPlayer = players;
  }

  window.minivllmPlayer = [];
  // Deferred scripts run before this event, so that all data is there by then.
  if (document.readyState === "complete") start();
  else document.addEventListener("DOMContentLoaded", start);
})();
