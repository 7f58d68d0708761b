"use strict";

// Steps through a recorded run: buttons, a list of all steps, arrow keys, and a sentence that screen readers say.
class StepPlayer {
  // `view` has show(step, before, number), which draws the state after a step into view.root.
  constructor(place, run, view, name) {
    this.run = run;
    this.view = view;
    this.back = this.button("Back", () => this.go(this.number - 1));
    this.next = this.button("Next", () => this.go(this.number + 1));
    this.list = element("select", { id: `${place.id}-step` }, this.options());
    this.list.addEventListener("change", () => this.go(Number(this.list.value)));
    this.telling = liveRegion(place);
    this.code = element("code");
    const controls = element("div", { class: "controls" }, this.back, this.next, field("Step", this.list));
    place.replaceChildren(controls, this.telling, element("pre", { class: "code" }, this.code), view.root);
    place.setAttribute("role", "group");
    place.setAttribute("aria-label", name);
    place.classList.add("playing");
    place.addEventListener("keydown", (event) => this.key(event));
    this.go(0);
  }

  button(words, act) {
    const made = element("button", { type: "button" }, words);
    // Not `disabled`, which would take the focus away at the last step.
    made.addEventListener("click", () => made.getAttribute("aria-disabled") !== "true" && act());
    return made;
  }

  options() {
    const groups = new Map();
    this.run.steps.forEach((step, i) => {
      const made = element("option", { value: i }, `${i + 1}. ${step.title}`);
      groups.set(step.chapter, [...(groups.get(step.chapter) ?? []), made]);
    });
    return [...groups].map(([chapter, steps]) => element("optgroup", { label: chapter }, steps));
  }

  key(event) {
    const moves = { ArrowLeft: this.number - 1, ArrowRight: this.number + 1, Home: 0, End: this.run.steps.length - 1 };
    const isPlain = !event.altKey && !event.ctrlKey && !event.metaKey && !event.shiftKey;
    // A list has uses of its own for these keys.
    if (isPlain && event.key in moves && event.target.matches("button")) {
      event.preventDefault();
      this.go(moves[event.key]);
    }
  }

  go(number) {
    const steps = this.run.steps;
    this.number = Math.max(0, Math.min(number, steps.length - 1));
    const step = steps[this.number];
    this.list.value = String(this.number);
    this.back.setAttribute("aria-disabled", String(this.number === 0));
    this.next.setAttribute("aria-disabled", String(this.number === steps.length - 1));
    const title = `Step ${this.number + 1} of ${steps.length}, ${step.chapter}: ${step.title}`;
    tell(this.telling, title, step.what, [element("span", { class: "why" }, "Why: "), step.why]);
    this.code.textContent = step.code;
    this.view.show(step, steps[this.number - 1] ?? null);
  }
}
