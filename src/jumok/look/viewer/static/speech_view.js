// Speech: spectrogram, alignment, audio, and style tokens. Hover a symbol to see its frames, hover a time to see its
// symbols; click to play from there.

import { Alignment } from "./alignment.js";
import { pluralize } from "./colours.js";
import { createWord } from "./dom.js";
import { SpectrogramView } from "./spectrogram_view.js";
import { StylePanel } from "./style_panel.js";

export class SpeechView extends SpectrogramView {
  static title = "Speech";
  static keys = [
    ["Space", "play, pause"],
    ["← →, Home, End", "move by step"],
    ["Enter", "play from the step"],
    ["Shift + ← →", "move by symbol"],
    ["Esc", "clear the selection"],
    ["↑ ↓", "previous, next layer"],
  ];
  static hint = "Hover a symbol to see its frames, hover a time to see its symbols; click to play from there.";
  static medium = "speech";

  static describe({ speech }, { kind, shape: [steps, symbols] }) {
    const seconds = (speech.shape[1] * speech.frame_seconds).toFixed(2);
    return [`${kind} attention`, pluralize(symbols, "symbol"), `${pluralize(steps, "step")} in ${seconds} s`];
  }

  /** `events` as in spectrogram_view.js; resynthesize(weights) returns a promise; reset() restores the recorded synthesis. */
  constructor(shared) {
    const { events } = shared,
      style = new StylePanel({
        resynthesize: (weights) => this.resynthesize(weights),
        reset: () => events.reset(),
        play: () => this.player.toggle(),
      });
    super(shared, [style.el]);
    this.style = style;
  }

  show(content) {
    const { speech, style, number } = content.item;
    this.data = content.item;
    this.style.show(style, number !== undefined);
    this.note.replaceChildren(createWord(speech.note));
    this.note.hidden = !speech.note;
    return super.show(content);
  }

  // The last step may have fewer frames.
  createTimeline() {
    const [numSteps, numSymbols] = this.content.shape,
      { frames_per_step: framesPerStep, frame_seconds: frameSeconds, shape } = this.medium,
      step = framesPerStep * frameSeconds;
    return { numSteps, numSymbols, start: 0, step, length: numSteps * step, sound: shape[1] * frameSeconds };
  }

  createMap(answer) {
    return new Alignment(answer, this.content.shape);
  }

  // ---------------------------------------------------------------- synthesis

  // One synthesis at a time; of requests that came meanwhile, the last one is used.
  async resynthesize(weights) {
    this.requested = weights;
    if (this.style.isWaiting) return;
    this.style.wait(true);
    let message = "";
    try {
      while (this.requested) {
        const weights = this.requested;
        this.requested = null;
        await this.events.resynthesize(weights);
        await this.loading;
      }
    } catch (error) {
      this.requested = null;
      message = error.message;
    }
    this.style.wait(false);
    this.style.show(this.data.style, this.data.number !== undefined); // sliders as in the current audio
    this.style.showStatus(message && `Synthesis failed: ${message}`);
    if (!message && this.style.autoplay.checked) this.player.playFrom(0);
  }
}
